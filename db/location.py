"""Where the database is: a flag, TREEOPT_DB, or one SQLite file in the user's data folder. Loads no SQL library."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from treeopt.errors import DatabaseError

__all__ = ["database_exists", "database_url", "default_available", "network_file_system", "sqlite_path"]

NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "lustre"})
"""Where SQLite's locks cannot be trusted."""


def database_url(flag: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the URL of the database to use.

    Parameters
    ----------
    flag : str, optional
        What the user gave: a URL, or the path of a SQLite file.
    environ : mapping, optional
        Stands in for the environment variables.

    Raises
    ------
    DatabaseError
        When the URL names no database that several commands can share, or no default can be found.
    """
    environ = os.environ if environ is None else environ
    chosen = flag or environ.get("TREEOPT_DB") or ""
    if not chosen:
        try:
            from platformdirs import user_data_path
        except ImportError as error:
            raise DatabaseError(
                "database: the default folder needs the platformdirs package: pip install 'treeopt[profile]'"
            ) from error
        return _file_url(user_data_path("treeopt", appauthor=False) / "treeopt.db")
    if "://" not in chosen:
        return _file_url(Path(chosen).expanduser().absolute())
    if chosen.startswith("sqlite") and sqlite_path(chosen) is None:
        raise DatabaseError(f"--db: {chosen!r} is a database in memory, lost with the command; give a file")
    if urlsplit(chosen).scheme.partition("+")[0] not in ("sqlite", "postgresql", "postgres"):
        raise DatabaseError(
            f"--db: {urlsplit(chosen).scheme!r} is not supported; use sqlite:///FILE or postgresql://.."
        )
    return "postgresql" + chosen.removeprefix("postgres") if chosen.startswith("postgres://") else chosen


def default_available(flag: str | None = None, environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether `database_url` can answer: a place was given, or the package that knows the default is there."""
    environ = os.environ if environ is None else environ
    return bool(flag or environ.get("TREEOPT_DB")) or find_spec("platformdirs") is not None


def _file_url(path: Path) -> str:
    return "sqlite:///" + quote(str(path), safe="/:\\")


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for other databases and for SQLite in memory.

    Examples
    --------
    >>> sqlite_path("sqlite:////srv/treeopt.db")
    PosixPath('/srv/treeopt.db')
    >>> sqlite_path("postgresql://host/treeopt") is None
    True
    """
    scheme, _, rest = url.partition("://")
    if not scheme.startswith("sqlite") or not rest.startswith("/"):
        return None
    name = unquote(rest[1:].partition("?")[0])
    return Path(name) if name and name != ":memory:" else None


def database_exists(url: str) -> bool:
    """Tell whether opening the URL could find anything: a file with content, or any server."""
    path = sqlite_path(url)
    try:
        return path is None or path.stat().st_size > 0
    except OSError:
        return False


def network_file_system(path: Path, mounts: str) -> str | None:
    r"""Return the type of the network file system that a path lies on, or None.

    Parameters
    ----------
    path : Path
        Absolute path; need not exist.
    mounts : str
        Content of ``/proc/mounts``.

    Examples
    --------
    >>> network_file_system(Path("/home/me/x.db"), "disk / ext4 rw 0 0\nsrv:/home /home nfs4 rw 0 0\n")
    'nfs4'
    """
    best = (0, "")
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        folder = fields[1].replace("\\040", " ")
        if path.is_relative_to(folder) and len(folder) >= best[0]:
            best = (len(folder), fields[2])
    return best[1] if best[1] in NETWORK_FILE_SYSTEMS else None
