"""Use case: search a table, and say what each assumption behind the prediction costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources

from treeopt.app.evaluate import Assessment, assess
from treeopt.artifact import read_document, read_with_digest
from treeopt.bundled import load_acceptance
from treeopt.errors import SearchError
from treeopt.search import search
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, TreeDesign

__all__ = ["Inputs", "SearchReport", "bundled_ranks", "load_inputs", "run_search", "search_report"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a search works on, with the digests of the documents it was read from."""

    table: AcceptanceTable
    table_digest: str
    latency: LatencyProfile | None = None
    latency_digest: str | None = None


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The design that was asked for, the other method's beside it, and what the models say of it.

    Parameters
    ----------
    design : TreeDesign
        The answer.
    other : TreeDesign or None
        The greedy design beside the exact one, or the exact one beside any other.
    other_missing : str or None
        Why there is no other.
    assessment : Assessment
        Value of the answer by each model.
    """

    design: TreeDesign
    other: TreeDesign | None
    other_missing: str | None
    assessment: Assessment


def load_inputs(acceptance: str, latency: str | None) -> Inputs:
    """Load a table by name or file, and a latency profile from a file.

    Raises
    ------
    DocumentError
        When one of them cannot be read.
    """
    table, table_digest = load_acceptance(acceptance)
    if latency is None:
        return Inputs(table, table_digest)
    profile, latency_digest = read_with_digest(latency, LatencyProfile)
    return Inputs(table, table_digest, profile, latency_digest)


def run_search(
    inputs: Inputs, budget: int, method: str, acceptance_model: str, progress: Progress | None = None
) -> TreeDesign:
    """Search, and record the digests of the documents that were used.

    Raises
    ------
    SearchError
        As `treeopt.search`.
    """
    design = search(
        inputs.table, budget, inputs.latency, method=method, acceptance_model=acceptance_model, progress=progress
    )
    return replace(design, acceptance_digest=inputs.table_digest, latency_digest=inputs.latency_digest)


def search_report(
    inputs: Inputs,
    design: TreeDesign,
    record: RankRecord | None,
    progress: Progress | None = None,
) -> SearchReport:
    """Put the other method beside a design, and evaluate the design under every model at hand."""
    method = "greedy" if design.method == "exact" else "exact"
    model, budget = design.acceptance_model or "independent", design.budget or 1
    try:
        other, missing = run_search(inputs, budget, method, model, progress), None
    except SearchError as error:
        other, missing = None, str(error)
    return SearchReport(design, other, missing, assess(design, inputs.table, inputs.latency, record))


def bundled_ranks(name: str) -> RankRecord | None:
    """Return the rank record that comes with a bundled table, if one does."""
    item = resources.files("treeopt") / "data" / f"{name}.ranks.json"
    if not item.is_file():
        return None
    with resources.as_file(item) as path:
        return read_document(path, RankRecord)
