"""Use case: search a table, and say what each assumption behind the prediction costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from treeopt.app.evaluate import Assessment, assess
from treeopt.app.latency_lookup import find_profile, stored_profile
from treeopt.artifact import document_digest, read_document, read_with_digest, to_document
from treeopt.bundled import load_acceptance
from treeopt.errors import DocumentError, InvalidValueError, SearchError
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


def load_inputs(
    acceptance: str,
    latency: str,
    *,
    context_len: int | None = None,
    batch_size: int | None = None,
    db_url: str | None = None,
) -> tuple[Inputs, str | None]:
    """Load a table by name or file, and the latency profile that is asked for.

    Parameters
    ----------
    acceptance : str
        Bundled name or file.
    latency : str
        ``none``; ``auto`` for the stored profile of this device and the table's model; a file; or the digest, or its
        beginning, of a stored profile.
    context_len, batch_size : int, optional
        What ``auto`` should be near to.
    db_url : str, optional
        Database of the stored profiles.

    Returns
    -------
    Inputs, str or None
        And a line to tell people which profile was taken, or why none, or what is wrong with the one they gave.

    Raises
    ------
    TreeOptError
        When the table or the profile cannot be read.
    """
    table, table_digest = load_acceptance(acceptance)
    line = None
    if latency == "none":
        profile, digest = None, None
    elif latency == "auto":
        profile, line = find_profile(table.model, context_len, batch_size or 1, db_url)
        digest = None if profile is None else document_digest(to_document(profile))
    elif Path(latency).exists():
        profile, digest = read_with_digest(latency, LatencyProfile)
        line = _doubt(latency, profile, table.model)
    else:
        profile = stored_profile(latency, db_url)
        digest = document_digest(to_document(profile))
    return Inputs(table, table_digest, profile, digest), line


def _doubt(name: str, profile: LatencyProfile, model: str) -> str | None:
    """Say why a profile out of a file should not be trusted as it is, if so."""
    doubts = [] if profile.complete else ["is not complete: sizes are missing, and a better one may be among them"]
    doubts += [f"is flagged {', '.join(profile.flags)}"] if profile.flags else []
    if profile.model not in (model, "unnamed") and model != "unnamed":
        doubts.append(f"is of {profile.model}, the acceptance table of {model}")
    return f"{name}: {'; '.join(doubts)}" if doubts else None


def run_search(
    inputs: Inputs,
    budget: int,
    method: str,
    acceptance_model: str,
    progress: Progress | None = None,
    upper_bound: float | None = None,
) -> TreeDesign:
    """Search, and record the digests of the documents that were used.

    ``upper_bound``, when it was proven before, is not computed again.

    Raises
    ------
    SearchError
        As `treeopt.search`.
    """
    design = search(
        inputs.table,
        budget,
        inputs.latency,
        method=method,
        acceptance_model=acceptance_model,
        upper_bound=upper_bound,
        progress=progress,
    )
    return replace(design, acceptance_digest=inputs.table_digest, latency_digest=inputs.latency_digest)


def search_report(
    inputs: Inputs,
    design: TreeDesign,
    record: RankRecord | None,
    progress: Progress | None = None,
    record_name: str | None = None,
) -> SearchReport:
    """Put the other method beside a design, and evaluate the design under every model at hand.

    ``record_name`` is what to call the rank record in errors.

    Raises
    ------
    DocumentError
        When the rank record is not of the table's guesses.
    """
    method = "greedy" if design.method == "exact" else "exact"
    model, budget = design.acceptance_model or "independent", design.budget or 1
    try:
        other, missing = run_search(inputs, budget, method, model, progress, design.upper_bound), None
    except SearchError as error:
        other, missing = None, str(error)
    try:
        assessment = assess(design, inputs.table, inputs.latency, record)
    except InvalidValueError as error:
        raise DocumentError(f"{record_name or 'rank record'}: {error}") from error
    return SearchReport(design, other, missing, assessment)


def bundled_ranks(name: str) -> RankRecord | None:
    """Return the rank record that comes with a bundled table, if one does."""
    item = resources.files("treeopt") / "data" / f"{name}.ranks.json"
    if not item.is_file():
        return None
    with resources.as_file(item) as path:
        return read_document(path, RankRecord)
