"""Read files that others wrote: bounded, and never run.

Python literals (lists, tuples and dicts of numbers) are scanned token by token first. What passes is shallow and made
of brackets and numbers only, so that parsing it can neither run code nor exhaust the parser's stack.
"""

import ast
import io
import os
import pickle
import re
import warnings
import zipfile
from typing import Any

from treeopt.artifact import MAX_DOCUMENT_BYTES, read_json
from treeopt.errors import DocumentError

__all__ = ["load_torch", "pick", "read_bytes", "read_literals", "read_text", "save_torch"]

MAX_TEXT_BYTES = 4 * 2**20
"""Larger text files are refused: the largest published file of trees has 0.9 MB."""

MAX_NESTING = 8
"""Deeper literals are refused: the deepest published one has 5 levels."""

_TOKEN = re.compile(r"[\s]+|(?P<open>[\[({])|(?P<close>[\])}])|[,:]|(?P<number>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)[ \t]*=[ \t]*(?=[\[({])", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)

_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    AssertionError,
    ImportError,
    zipfile.BadZipFile,
)
"""What a hostile or damaged file can make the unpickler raise."""


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a file of at most ``limit`` bytes.

    Raises
    ------
    DocumentError
        When it is larger (it is then left unread) or cannot be read.
    """
    where = os.fspath(path)
    try:
        with open(where, "rb") as stream:
            raw = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(f"{where}: cannot be read ({reason}); check its name and its rights") from error
    if len(raw) > limit:
        raise DocumentError(f"{where}: is larger than {limit / 2**20:g} MB; no such file of this format is known")
    if not raw.strip():
        raise DocumentError(f"{where}: is empty; check its name")
    return raw


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a UTF-8 text file of bounded size.

    Raises
    ------
    DocumentError
        When it is too large, unreadable or not UTF-8.
    """
    try:
        return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{os.fspath(path)}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def read_literals(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the literals of a file: one bare literal (named ``""``), ``name = literal`` lines, or a JSON object.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    dict
        Name to value. Of a JSON object, only the entries that are lists.

    Raises
    ------
    DocumentError
        When the file holds anything but brackets and numbers.
    """
    where = os.fspath(path)
    text = _COMMENT.sub("", read_text(path))
    if re.match(r'\s*\{\s*"', text):
        document = read_json(path)
        return {name: value for name, value in document.items() if isinstance(value, list)}  # type: ignore[attr-defined]
    starts = list(_ASSIGNMENT.finditer(text))
    if not starts:
        return {"": _literal(text, where)}
    if text[: starts[0].start()].strip():
        raise DocumentError(f"{where}: begins with text that is no `name = [..]` line; remove it")
    ends = [start.start() for start in starts[1:]] + [len(text)]
    found: dict[str, Any] = {}
    for start, end in zip(starts, ends, strict=True):
        if start[1] in found:
            raise DocumentError(f"{where}: {start[1]} stands twice; keep one")
        found[start[1]] = _literal(text[start.end() : end], f"{where}: {start[1]}")
    return found


def pick(found: dict[str, Any], name: str | None, where: str) -> Any:
    """Return the value called ``name``; the only one when no name is given.

    Raises
    ------
    DocumentError
        When there is no such name, or several and none was chosen.
    """
    names = ", ".join(sorted(found)[:8]) + (", .." if len(found) > 8 else "")
    if name is not None:
        if name not in found:
            raise DocumentError(
                f"{where}: holds nothing called {name!r}; --name can be: {names or 'nothing, it is empty'}"
            )
        return found[name]
    if not found:
        raise DocumentError(f"{where}: holds no list; give a file of this format")
    if len(found) > 1:
        raise DocumentError(f"{where}: holds {len(found)} of them; choose one with --name: {names}")
    return next(iter(found.values()))


def _literal(text: str, where: str) -> Any:
    _scan(text, where)
    try:
        tree = ast.parse(text.strip(), mode="eval")
        _refuse_repeated_keys(tree, where)
        return ast.literal_eval(tree)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise DocumentError(f"{where}: is no list or dictionary of numbers ({error}); check its brackets") from error


def _scan(text: str, where: str) -> None:
    """Let brackets, numbers, commas and colons pass; bound the nesting; refuse numbers side by side (``1-1``)."""
    closing: list[str] = []
    place, number_before = 0, False
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            line = text.count("\n", 0, place) + 1
            raise DocumentError(
                f"{where}: holds {text[place : place + 12]!r} on line {line}; only lists and dictionaries of numbers "
                "are read, and nothing is run"
            )
        if token["open"]:
            closing.append(_PAIRS[token["open"]])
            if len(closing) > MAX_NESTING:
                raise DocumentError(
                    f"{where}: is nested more than {MAX_NESTING} deep; no such file of this format is known"
                )
        elif token["close"] and (not closing or closing.pop() != token["close"]):
            raise DocumentError(f"{where}: has a {token['close']!r} that closes nothing; check its brackets")
        if token["number"] and number_before:
            raise DocumentError(f"{where}: has two numbers without a comma near {token['number'][:20]!r}; add it")
        if not token[0].isspace():
            number_before = token["number"] is not None
        place = token.end()
    if closing:
        raise DocumentError(f"{where}: lacks {len(closing)} closing brackets; the file may be cut off")


def _refuse_repeated_keys(tree: ast.AST, where: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if len(set(keys)) != len(keys):
                raise DocumentError(f"{where}: a dictionary repeats a key; keep one of the two")


def load_torch(path: str | os.PathLike[str]) -> Any:
    """Load a ``.pt`` file with ``weights_only``: tensors, numbers, lists and dictionaries; code in it is refused.

    Raises
    ------
    DocumentError
        When torch is missing, or the file is too large, damaged or holds code.
    """
    where = os.fspath(path)
    raw = read_bytes(path)
    torch = _torch(where)
    try:
        if zipfile.is_zipfile(io.BytesIO(raw)):
            # A small archive can unpack to anything.
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                if sum(item.file_size for item in archive.infolist()) > MAX_DOCUMENT_BYTES:
                    raise DocumentError(f"{where}: unpacks to more than {MAX_DOCUMENT_BYTES // 2**20} MB; refused")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of foreign pickle protocols; the error below says enough
            return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
    except _PICKLE_ERRORS as error:
        raise DocumentError(
            f"{where}: is no .pt file of plain tensors and lists; it is damaged or holds code, which is never run"
        ) from error


def save_torch(value: Any) -> bytes:
    """Return the ``.pt`` file of a value.

    Raises
    ------
    DocumentError
        When torch is missing.
    """
    stream = io.BytesIO()
    _torch(".pt output").save(value, stream)
    return stream.getvalue()


def _torch(where: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise DocumentError(f"{where}: needs torch; install it with: pip install 'treeopt[runtime]'") from error
    return torch
