"""Documents: every value of `treeopt.types` as versioned JSON, read strictly and written whole or not at all.

=========================  ==================
document                   value
=========================  ==================
``treeopt.acceptance/1``   `AcceptanceTable`
``treeopt.ranks/1``        `RankRecord`
``treeopt.latency/1``      `LatencyProfile`
``treeopt.tree/1``         `TreeDesign`
``treeopt.switch/1``       `SwitchTable`
``treeopt.run/1``          `DecodeRun`
=========================  ==================

Two layers check a document: pydantic its shape (names, JSON types, finite numbers), the frozen dataclass its meaning.
A digest is the SHA-256 of the canonical JSON: sorted keys, no spaces. Numbers are kept as written (``1`` stays ``1``),
so that the digest of a value equals the digest of the file it was read from.
"""

import codecs
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from treeopt.errors import DocumentError, InvalidValueError
from treeopt.types import (
    AcceptanceTable,
    DecodeRun,
    LatencyPoint,
    LatencyProfile,
    RankRecord,
    SparseTree,
    SwitchEntry,
    SwitchTable,
    TreeDesign,
    TreeNode,
)

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "Document",
    "canonical_json",
    "digest",
    "document_digest",
    "from_document",
    "read_document",
    "read_json",
    "read_with_digest",
    "to_document",
    "write_bytes",
    "write_document",
    "write_text",
]

MAX_DOCUMENT_BYTES = 64 * 2**20
"""Larger files are refused unread: no document of treeopt comes near this size."""

Document: TypeAlias = AcceptanceTable | RankRecord | LatencyProfile | TreeDesign | SwitchTable | DecodeRun
_LONGEST_PLACE = 120
"""Characters of a field's name in a message; only a name that no document of ours has is longer."""

D = TypeVar("D", AcceptanceTable, RankRecord, LatencyProfile, TreeDesign, SwitchTable, DecodeRun)
Json: TypeAlias = dict[str, Any]


class _Shape(BaseModel):
    """Strict JSON shape: no unknown field, no bool for a number, no number for a text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _AcceptanceShape(_Shape):
    format: Literal["treeopt.acceptance/1"]
    model: str
    source: str
    rule: str
    temperature: float
    num_samples: int | None
    marginals: list[list[float]]
    ranks: list[list[int]] | None = None
    tokens_per_prompt_token: int = 1
    intervals: list[list[list[float]]] | None = None
    calibration: dict[str, Any] | None = None


class _RanksShape(_Shape):
    format: Literal["treeopt.ranks/1"]
    model: str
    source: str
    rule: str
    temperature: float
    max_rank: int
    sequences: list[list[list[int]]]
    probabilities: list[list[list[float]]] | None = None


class _PointShape(_Shape):
    num_tokens: int
    median_s: float
    iqr_s: float | None = None
    num_samples: int | None = None
    samples_s: list[float] | None = None


class _LatencyShape(_Shape):
    format: Literal["treeopt.latency/1"]
    device: dict[str, Any]
    model: str
    dtype: str
    batch_size: int
    context_len: int
    attention: str
    graph_mode: str
    points: list[_PointShape]
    cache: str | None = None
    kernels: str | None = None
    versions: dict[str, str] | None = None
    flags: list[str] | None = None
    complete: bool = True
    sha256: str | None = None


class _NodeShape(_Shape):
    path: list[int]
    prompt_tokens: int


class _TreeShape(_Shape):
    format: Literal["treeopt.tree/1"]
    states: dict[str, list[_NodeShape]]
    budget: int | None
    method: str
    objective: str
    acceptance_model: str | None
    tokens_per_prompt_token: int
    pass_tokens: dict[str, int]
    acceptance_length: float | None
    upper_bound: float | None
    tokens_per_second: float | None
    speedup: float | None
    acceptance_digest: str | None
    latency_digest: str | None


class _EntryShape(_Shape):
    batch_max: int
    context_max: int
    tree: _TreeShape


class _SwitchShape(_Shape):
    format: Literal["treeopt.switch/1"]
    entries: list[_EntryShape]


class _RunShape(_Shape):
    format: Literal["treeopt.run/1"]
    model: str
    guesses: str
    tree_digest: str | None
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    steps_per_state: list[int]
    prefill_s: float
    decode_s: float
    finish_reason: str
    forward_s: float | None = None
    propose_s: float | None = None
    verify_s: float | None = None
    commit_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of document is checked and built."""

    shape: type[_Shape]
    value: type[Any]
    build: Callable[[Json], Any]


def _freeze(value: Any) -> Any:
    """Turn lists into tuples, all the way down; numbers and mappings stay as they are."""
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value


def _thaw(value: Any) -> Any:
    """Turn tuples into lists, all the way down."""
    if isinstance(value, tuple):
        return [_thaw(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _build_plain(kind: Callable[..., Any]) -> Callable[[Json], Any]:
    return lambda body: kind(**{name: _freeze(value) for name, value in body.items()})


def _build_latency(body: Json) -> LatencyProfile:
    claimed = body.pop("sha256", None)
    if claimed is not None and claimed != document_digest({"format": "treeopt.latency/1", **body}):
        raise InvalidValueError("sha256", "does not match the content: the file was changed or cut; export it again")
    points = []
    for i, point in enumerate(body.pop("points")):
        try:
            points.append(LatencyPoint(**{name: _freeze(value) for name, value in point.items()}))
        except InvalidValueError as error:
            raise InvalidValueError(f"points[{i}].{error.field}", error.problem) from error
    rest = {name: _freeze(value) for name, value in body.items()}
    return LatencyProfile(points=tuple(points), **rest)


def _build_tree(body: Json) -> TreeDesign:
    states, pass_tokens = body.pop("states"), body.pop("pass_tokens")
    names = [str(k) for k in range(len(states))]
    for place, given in (("states", states), ("pass_tokens", pass_tokens)):
        if set(given) != set(names):
            raise InvalidValueError(place, f"must name the states 0 to m without gaps, not {sorted(given)}")
    trees = []
    for name in names:
        try:
            trees.append(SparseTree(tuple(TreeNode(tuple(n["path"]), n["prompt_tokens"]) for n in states[name])))
        except InvalidValueError as error:
            place = error.field.replace("nodes", f"states.{name}", 1)
            raise InvalidValueError(place if "states" in place else f"states.{name}.{place}", error.problem) from error
    return TreeDesign(trees=tuple(trees), pass_tokens=tuple(pass_tokens[name] for name in names), **body)


def _build_switch(body: Json) -> SwitchTable:
    entries = []
    for i, entry in enumerate(body["entries"]):
        try:
            tree = _build_tree({name: item for name, item in entry["tree"].items() if name != "format"})
        except InvalidValueError as error:
            raise InvalidValueError(f"entries[{i}].tree.{error.field}", error.problem) from error
        try:
            entries.append(SwitchEntry(entry["batch_max"], entry["context_max"], tree))
        except InvalidValueError as error:
            raise InvalidValueError(f"entries[{i}].{error.field}", error.problem) from error
    return SwitchTable(tuple(entries))


_KINDS: dict[str, _Kind] = {
    "treeopt.acceptance/1": _Kind(_AcceptanceShape, AcceptanceTable, _build_plain(AcceptanceTable)),
    "treeopt.ranks/1": _Kind(_RanksShape, RankRecord, _build_plain(RankRecord)),
    "treeopt.latency/1": _Kind(_LatencyShape, LatencyProfile, _build_latency),
    "treeopt.tree/1": _Kind(_TreeShape, TreeDesign, _build_tree),
    "treeopt.switch/1": _Kind(_SwitchShape, SwitchTable, _build_switch),
    "treeopt.run/1": _Kind(_RunShape, DecodeRun, _build_plain(DecodeRun)),
}


def _format_of(value: type[Any]) -> str:
    return next(name for name, kind in _KINDS.items() if kind.value is value)


def canonical_json(document: Json) -> str:
    """Return the one JSON text that a digest is taken of: sorted keys, no spaces, finite numbers only."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def document_digest(document: Json) -> str:
    """Return the SHA-256, in hex, of a document's canonical JSON."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def to_document(value: Document) -> Json:
    """Return a value as its JSON document; optional fields at their default are left out.

    Examples
    --------
    >>> to_document(AcceptanceTable.from_marginals([[0.5]]))["format"]
    'treeopt.acceptance/1'
    """
    name = _format_of(type(value))
    document: Json = {"format": name}
    if isinstance(value, SwitchTable):
        document["entries"] = [
            {"batch_max": entry.batch_max, "context_max": entry.context_max, "tree": to_document(entry.tree)}
            for entry in value.entries
        ]
        return document
    if isinstance(value, TreeDesign):
        document["states"] = {
            str(k): [{"path": list(node.path), "prompt_tokens": node.prompt_tokens} for node in tree.nodes]
            for k, tree in enumerate(value.trees)
        }
    for entry in fields(value):
        content = getattr(value, entry.name)
        shape = _KINDS[name].shape.model_fields.get(entry.name)
        if shape is not None and not shape.is_required() and content == shape.default:
            continue
        if entry.name == "points":
            content = [_point_document(point) for point in content]
        elif entry.name == "pass_tokens":
            content = {str(k): tokens for k, tokens in enumerate(content)}
        elif entry.name == "trees":
            continue
        document[entry.name] = _thaw(content)
    return document


def _point_document(point: LatencyPoint) -> Json:
    pairs = ((entry.name, _thaw(getattr(point, entry.name))) for entry in fields(point))
    return {name: content for name, content in pairs if content is not None}


def digest(value: Document) -> str:
    """Return the SHA-256, in hex, of a value's canonical JSON document."""
    return document_digest(to_document(value))


def from_document(document: object, where: str, kind: type[D] | None = None) -> D:
    """Check a parsed JSON document and build its value.

    Parameters
    ----------
    document : object
        Parsed JSON.
    where : str
        What to call it in errors, usually the file's name.
    kind : type, optional
        The type that is wanted; any of treeopt's documents without it.

    Returns
    -------
    AcceptanceTable, RankRecord, LatencyProfile, TreeDesign, SwitchTable or DecodeRun

    Raises
    ------
    DocumentError
        With file, place and remedy in one line.
    """
    document, name = _checked_format(document, where, kind)
    shape, build = _KINDS[name].shape, _KINDS[name].build
    try:
        shape.model_validate(document)
    except ValidationError as error:
        raise DocumentError(f"{where}: {_first_problem(error, name)}") from error
    body = {key: item for key, item in document.items() if key != "format"}
    try:
        canonical_json(body)  # free-form parts (device, calibration) pass the shape check with NaN inside
        value: D = build(body)
    except InvalidValueError as error:
        raise DocumentError(f"{where}: {error}") from error
    except ValueError as error:
        raise DocumentError(f"{where}: holds NaN or an infinity; write finite numbers") from error
    return value


def _checked_format(document: object, where: str, kind: type[Any] | None) -> tuple[Json, str]:
    wanted = sorted(_KINDS) if kind is None else [_format_of(kind)]
    if not isinstance(document, dict):
        raise DocumentError(f"{where}: holds no JSON object; expected a {' or '.join(wanted)} document")
    name = document.get("format")
    if name in wanted:
        return document, str(name)
    family = str(name).rpartition("/")[0]
    if any(family == known.rpartition("/")[0] for known in wanted):
        raise DocumentError(f"{where}: format: version {name!r} is not one this treeopt reads ({', '.join(wanted)})")
    raise DocumentError(f"{where}: format: is {_shown(name)}; expected {' or '.join(wanted)}")


def _shown(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _first_problem(error: ValidationError, name: str) -> str:
    """Say the first of pydantic's complaints as ``place: what is wrong; remedy``."""
    first = error.errors(include_url=False)[0]
    place = ""
    for part in first["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    place = place if len(place) <= _LONGEST_PLACE and place.isprintable() else _shown(place, _LONGEST_PLACE)
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown field; {name} has no such field, remove it"
    if first["type"] == "missing":
        return f"{place}: missing; {name} requires it"
    problem = first["msg"][0].lower() + first["msg"][1:]
    return f"{place}: {problem}, not {_shown(first['input'])}"


def read_json(path: str | os.PathLike[str]) -> object:
    """Read one JSON file strictly: UTF-8, finite numbers, no repeated key, bounded size and depth.

    Raises
    ------
    DocumentError
        In one line that names the file.
    """
    where = os.fspath(path)
    try:
        if os.stat(where).st_size > MAX_DOCUMENT_BYTES:
            raise DocumentError(f"{where}: is larger than {MAX_DOCUMENT_BYTES // 2**20} MB; no treeopt document is")
        with open(where, "rb") as stream:
            raw = stream.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(f"{where}: cannot be read ({reason}); give a JSON file") from error
    if not raw.strip():
        raise DocumentError(f"{where}: is empty; give a JSON document")
    if raw.startswith(codecs.BOM_UTF8):
        raise DocumentError(f"{where}: starts with a byte order mark; save it as UTF-8 without one")
    try:
        return json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except UnicodeDecodeError as error:
        raise DocumentError(f"{where}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except RecursionError as error:
        raise DocumentError(f"{where}: is nested too deeply to be a treeopt document") from error
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"{where}: is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:
        raise DocumentError(f"{where}: is not strict JSON: {error}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number; write a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {repeated!r} stands twice; keep one")
    return document


def read_document(path: str | os.PathLike[str], kind: type[D] | None = None) -> D:
    """Read a document of treeopt from a file.

    Parameters
    ----------
    path : path-like
        The file.
    kind : type, optional
        The type that is wanted; any of treeopt's documents without it.

    Returns
    -------
    AcceptanceTable, RankRecord, LatencyProfile, TreeDesign, SwitchTable or DecodeRun

    Raises
    ------
    DocumentError
        With file, place and remedy in one line.
    """
    return from_document(read_json(path), os.fspath(path), kind)


def read_with_digest(path: str | os.PathLike[str], kind: type[D]) -> tuple[D, str]:
    """Read a document and the digest of the file's own JSON, which may spell out defaults that `digest` leaves out."""
    document = read_json(path)
    return from_document(document, os.fspath(path), kind), document_digest(document)  # type: ignore[arg-type]


def write_document(value: Document, path: str | os.PathLike[str]) -> None:
    """Write a value as its document, whole or not at all.

    Latency profiles get their ``sha256``.

    Raises
    ------
    DocumentError
        When the file cannot be written; what stood there before is untouched.
    """
    document = to_document(value)
    if isinstance(value, LatencyProfile):
        document["sha256"] = document_digest(document)
    write_text(json.dumps(document, allow_nan=False, indent=1) + "\n", path)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a UTF-8 text file, whole or not at all; see `write_bytes`."""
    write_bytes(text.encode("utf-8"), path)


def write_bytes(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file through a temporary file in the same folder and a rename.

    A symbolic link stays and what it points to is written; a pipe or a device is written to as it is.

    Raises
    ------
    DocumentError
        When it cannot be written; what stood there before is untouched.
    """
    target = Path(path)
    if target.is_dir():
        raise DocumentError(f"{target}: is a folder; name a file in it")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        target = Path(os.path.realpath(target))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:20]}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        where, reason = os.fspath(path), error.strerror or str(error)
        raise DocumentError(f"{where}: cannot be written ({reason}); check the folder and its rights") from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
