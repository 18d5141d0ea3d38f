"""Acceptance tables that come with the package, and loading one by name or from a file."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from treeopt.artifact import read_with_digest
from treeopt.errors import DocumentError
from treeopt.types import AcceptanceTable

__all__ = ["DEFAULT_TABLE", "bundled_tables", "load_acceptance"]

DEFAULT_TABLE = "smollm2-135m-instruct-m3"


def bundled_tables() -> dict[str, Traversable]:
    """Return the tables that come with the package: name to file, sorted by name."""
    folder = resources.files("treeopt") / "data"
    found = {item.name.removesuffix(".json"): item for item in folder.iterdir() if item.name.endswith(".json")}
    return {name: found[name] for name in sorted(found) if not name.endswith(".ranks")}


def load_acceptance(name_or_path: str) -> tuple[AcceptanceTable, str]:
    """Load a table by bundled name or from a file, with the digest of its document.

    Raises
    ------
    DocumentError
        When it is neither, or the file is not an acceptance table.

    Examples
    --------
    >>> table, digest = load_acceptance("vicuna-7b-m3")
    >>> table.model
    'lmsys/vicuna-7b-v1.3'
    """
    tables = bundled_tables()
    if name_or_path in tables:
        with resources.as_file(tables[name_or_path]) as path:
            return read_with_digest(path, AcceptanceTable)
    if not Path(name_or_path).exists():
        raise DocumentError(
            f"{name_or_path}: no such file, and no bundled table; the bundled ones: {', '.join(tables)}"
        )
    return read_with_digest(name_or_path, AcceptanceTable)
