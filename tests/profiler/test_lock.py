"""One measurement per device, whoever runs it and however it ends."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from profiler.lock import device_lock, lock_folder
from treeopt.errors import DeviceError

HOLD = (
    "import sys, time; from profiler.lock import device_lock\n"
    "with device_lock('k' * 64):\n    print('held', flush=True); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "locks"))
    return tmp_path / "locks"


def holder() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_refused_until_the_first_is_killed() -> None:
    process = holder()
    try:
        with pytest.raises(DeviceError, match="another measurement is running"), device_lock("k" * 64):
            pass
        with device_lock("other" * 10):
            pass  # another device is free
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with device_lock("k" * 64, timeout_s=5):
        pass


def test_every_user_can_lock_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with device_lock("k" * 64) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert stat.S_IMODE(folder.stat().st_mode) == 0o777
    finally:
        os.umask(before)


def test_an_unusable_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(tmp_path / "file" / "locks"))
    with pytest.raises(DeviceError, match="TREEOPT_LOCK_DIR"), device_lock("k" * 64):
        pass


def test_the_default_folder_is_the_same_for_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEOPT_LOCK_DIR")
    monkeypatch.setenv("TMPDIR", "/somewhere/private")
    assert lock_folder() == Path("/tmp/treeopt-locks")  # noqa: S108
