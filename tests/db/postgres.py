"""A throw-away PostgreSQL server, started by the test run on a folder and a port of its own."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNPRIVILEGED = ("postgres", "nobody")


def find_programs() -> Path | None:
    """Return the folder of initdb and postgres; Debian keeps it out of PATH."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


def _as_user() -> list[str]:
    """Return the words that run a program as somebody other than root, which PostgreSQL refuses to be."""
    if os.geteuid() != 0:
        return []
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in UNPRIVILEGED if name in names)
    return ["runuser", "-u", user, "--"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(programs: Path) -> Iterator[str]:
    """Yield the URL prefix of a server, to which a database name can be added."""
    # A short folder: the name of a Unix socket may have 107 bytes.
    memory = Path("/dev/shm")  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="tpg", dir=memory if os.access(memory, os.W_OK) else "/tmp"))  # noqa: S108
    prefix = _as_user()
    data = folder / "data"
    if prefix:
        shutil.chown(folder, user=prefix[2])
    port = _free_port()
    run = {"check": True, "capture_output": True, "cwd": folder, "timeout": 60}
    subprocess.run(
        [*prefix, programs / "initdb", "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync"], **run
    )
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder} -c fsync=off -c max_connections=60"
    log = folder / "log"
    subprocess.run([*prefix, programs / "pg_ctl", "-D", data, "-o", options, "-l", log, "-w", "start"], **run)
    try:
        yield f"postgresql://tester@127.0.0.1:{port}/"
    finally:
        subprocess.run([*prefix, programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"], **run)
        shutil.rmtree(folder, ignore_errors=True)
