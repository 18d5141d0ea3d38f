"""One measurement at a time on a device, across processes and users.

The lock is a file lock that the system drops with its process, however that ends: kill -9 leaves nothing behind.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treeopt.errors import DeviceError

__all__ = ["device_lock", "lock_folder"]


def lock_folder() -> Path:
    """Return the folder of the lock files: TREEOPT_LOCK_DIR, else one that all users of this machine share."""
    chosen = os.environ.get("TREEOPT_LOCK_DIR")
    if chosen:
        return Path(chosen)
    # Not TMPDIR on POSIX: it may differ from user to user, and then two users would measure at once.
    return (Path("/tmp") if os.name == "posix" else Path(tempfile.gettempdir())) / "treeopt-locks"  # noqa: S108


@contextmanager
def device_lock(lock_key: str, timeout_s: float = 0.0) -> Iterator[Path]:
    """Hold a device for one measurement.

    Parameters
    ----------
    lock_key : str
        `profiler.device.DeviceIdentity.lock_key`.
    timeout_s : float
        How long to wait for another measurement to end.

    Raises
    ------
    DeviceError
        When another process holds it, or the lock file cannot be made.
    """
    from filelock import FileLock, Timeout

    folder = lock_folder()
    path = folder / f"{lock_key[:32]}.lock"
    try:
        _open_to_all(folder, path)
        lock = FileLock(path, timeout=timeout_s, mode=0o666)
        lock.acquire()
    except Timeout as error:
        raise DeviceError(
            f"device: another measurement is running on it (lock {path}); wait for it, or look at treeopt profile jobs"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"device: the lock file {path} cannot be used ({error.strerror}); mend its rights, or set "
            "TREEOPT_LOCK_DIR to a folder that all users of this machine can write"
        ) from error
    try:
        yield path
    finally:
        lock.release()


def _open_to_all(folder: Path, path: Path) -> None:
    """Make folder and file usable by every user, whatever this user's umask."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
    if not path.exists():
        handle = os.open(path, os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if hasattr(os, "fchmod"):
                os.fchmod(handle, 0o666)
        finally:
            os.close(handle)
