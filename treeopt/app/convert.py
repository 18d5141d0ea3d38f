"""Use case: turn treeopt's documents into other engines' files, and theirs into treeopt's documents."""

import os
from collections.abc import Callable, Sequence

from treeopt.artifact import Document, read_document, read_json
from treeopt.errors import DocumentError, InvalidValueError
from treeopt.formats import (
    choices,
    growmap,
    jetspec,
    llama_cpp,
    medusa_accuracies,
    ppd,
    sglang,
    tensorrt_llm,
    vllm,
)
from treeopt.formats.reading import load_torch, pick, read_literals, read_text
from treeopt.types import AcceptanceTable, LatencyProfile, TreeDesign

__all__ = ["EXPORT_FORMATS", "IMPORT_FORMATS", "export_documents", "import_file"]

Path = tuple[int, ...]
Content = str | bytes


def _sglang_text(paths: list[Path]) -> str:
    """Return the smallest EAGLE setting whose pool holds the tree."""
    return sglang.EagleFlags(_depth(paths), _topk(paths), len(paths) + 1).text()


def _tensorrt_llm_text(paths: list[Path]) -> str:
    """Return the smallest dynamic tree whose pool holds the tree and whose token limit it keeps."""
    depth = _depth(paths)
    return tensorrt_llm.DynamicTree(depth, len(paths), max(_topk(paths), -(-len(paths) // depth))).text()


def _depth(paths: list[Path]) -> int:
    if not paths:
        raise InvalidValueError("tree", "is the root alone; run the engine without speculation")
    return max(map(len, paths))


def _topk(paths: list[Path]) -> int:
    """Return the nodes per level that EAGLE must keep: those with children, and the ranks used."""
    inner = {path[:-1] for path in paths}
    per_level = [sum(len(path) == depth for path in inner) for depth in range(_depth(paths))]
    return max(max(per_level), 1 + max(path[-1] for path in paths))


def _llama_cpp_text(paths: list[Path]) -> str:
    """Return the flags of a chain."""
    if not paths:
        return llama_cpp.NO_SPECULATION
    branch = next((path for path in paths if any(path)), None)
    if branch is not None:
        raise InvalidValueError(f"choices {list(branch)}", "branches; llama.cpp verifies a chain of best guesses only")
    return llama_cpp.DraftFlags(_depth(paths), 0.0).text()


_TREES: dict[str, Callable[[list[Path]], Content]] = {
    "eagle": choices.eagle_choices_text,
    "llama.cpp": _llama_cpp_text,
    "medusa": choices.choices_text,
    "sequoia": growmap.growmap_bytes,
    "sglang": _sglang_text,
    "tensorrt-llm": _tensorrt_llm_text,
    "umbrella": growmap.growmap_text,
    "vllm": vllm.token_tree_text,
}
_TABLES = {"jetspec": jetspec.profile_text}
_PROFILES = ("dspark", "llama.cpp-costs")

EXPORT_FORMATS = tuple(sorted([*_TREES, *_TABLES, *_PROFILES]))
"""Formats that can be written."""

IMPORT_FORMATS = (
    "eagle",
    "jetspec",
    "medusa",
    "medusa-accuracies",
    "ppd",
    "ppd-accuracies",
    "sequoia",
    "sequoia-vector",
    "umbrella",
    "vllm",
)
"""Formats that can be read."""


def export_documents(paths: Sequence[str | os.PathLike[str]], to: str) -> Content:
    """Turn documents of treeopt into another engine's file.

    Parameters
    ----------
    paths : sequence of path-like
        A tree design; for ``jetspec`` an acceptance table; for ``dspark`` latency profiles, one or several; for
        ``llama.cpp-costs`` one latency profile.
    to : str
        One of `EXPORT_FORMATS`.

    Returns
    -------
    str or bytes
        The engine's own syntax and nothing else; bytes for ``sequoia``.

    Raises
    ------
    DocumentError
        When a document cannot be read or the engine cannot run it; names the rule that is broken.
    """
    if to not in EXPORT_FORMATS:
        raise DocumentError(f"--to: must be one of {', '.join(EXPORT_FORMATS)}, not {to!r}")
    if to != "dspark" and len(paths) != 1:
        raise DocumentError(f"--to {to}: takes one document, not {len(paths)}; only dspark joins several profiles")
    where = ", ".join(os.fspath(path) for path in paths)
    try:
        if to == "dspark":
            return sglang.steps_table([read_document(path, LatencyProfile) for path in paths]).text()
        if to == "llama.cpp-costs":
            return llama_cpp.batch_costs_text(llama_cpp.batch_costs(read_document(paths[0], LatencyProfile)))
        if to in _TABLES:
            return _TABLES[to](read_document(paths[0], AcceptanceTable))
        return _TREES[to](choices.paths_of_design(read_document(paths[0], TreeDesign), to))
    except InvalidValueError as error:
        raise DocumentError(f"{where}: cannot be written for {to}: {error}") from error


def import_file(
    path: str | os.PathLike[str], source: str, *, name: str | None = None, num_distances: int | None = None
) -> Document:
    """Turn another engine's file into a document of treeopt.

    Parameters
    ----------
    path : path-like
        The file. Nothing in it is run; ``.pt`` files are opened with ``weights_only``.
    source : str
        One of `IMPORT_FORMATS`.
    name : str, optional
        Which one, of a file that holds several.
    num_distances : int, optional
        Of trees: guesses that are made (heads), when more than the tree is deep. Of ``sequoia-vector``: distances to
        build rows for, required.

    Returns
    -------
    TreeDesign or AcceptanceTable

    Raises
    ------
    DocumentError
        In one line that names the file and the rule broken.
    """
    if source not in IMPORT_FORMATS:
        raise DocumentError(f"--from: must be one of {', '.join(IMPORT_FORMATS)}, not {source!r}")
    where = os.fspath(path)
    try:
        if source in ("medusa", "eagle", "vllm"):
            return choices.design_from_paths(_read_choices(path, source, name), num_distances)
        if source in ("sequoia", "umbrella"):
            value = load_torch(path) if source == "sequoia" else read_json(path)
            return choices.design_from_paths(growmap.paths_from_growmap(value), num_distances)
        if source == "ppd":
            return ppd.design_from_trees(pick(read_literals(path), name, where))
        return _import_table(path, source, name, num_distances)
    except InvalidValueError as error:
        raise DocumentError(f"{where}: {error}") from error


def _read_choices(path: str | os.PathLike[str], source: str, name: str | None) -> list[Path]:
    paths = choices.paths_from_value(pick(read_literals(path), name, os.fspath(path)))
    if source == "vllm":
        vllm.check_token_tree(paths)
    elif source == "eagle":
        choices.check_eagle_choices(paths)
    else:
        choices.check_choices(paths)
    return paths


def _import_table(
    path: str | os.PathLike[str], source: str, name: str | None, num_distances: int | None
) -> AcceptanceTable:
    where = os.fspath(path)
    if source == "jetspec":
        return jetspec.table_from_profile(read_json(path))
    if source == "ppd-accuracies":
        return ppd.table_from_accuracies(load_torch(path))
    if source == "medusa-accuracies":
        table: AcceptanceTable = pick(dict(medusa_accuracies.tables_from_csv(read_text(path))), name, where)
        return table
    if num_distances is None:
        raise DocumentError(f"{where}: a vector has no depth; give --distances, Sequoia's max_depth less 1")
    return growmap.table_from_vector(load_torch(path), num_distances)
