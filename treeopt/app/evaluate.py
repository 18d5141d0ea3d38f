"""Use case: the value of a design by each model that the data allow, so that each assumption's cost can be seen."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from treeopt.acceptance import acceptance_trie
from treeopt.artifact import read_document
from treeopt.bundled import bundled_tables, load_acceptance
from treeopt.errors import DocumentError, InvalidValueError
from treeopt.markov import Evaluation, evaluate_design
from treeopt.replay import Replay, replay
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, TreeDesign

__all__ = ["Assessment", "assess", "assessment_document", "evaluate_tree", "table_of"]


@dataclass(frozen=True, slots=True)
class Assessment:
    """A design's value by each model; None where the data were not given.

    Parameters
    ----------
    independent : Evaluation or None
        By the paper's independence of distances.
    joint : Evaluation or None
        By joint counts.
    replayed : Replay or None
        By replay of recorded ranks.
    """

    independent: Evaluation | None
    joint: Evaluation | None
    replayed: Replay | None


def assess(
    design: TreeDesign,
    table: AcceptanceTable | None,
    latency: LatencyProfile | None = None,
    record: RankRecord | None = None,
    seed: int = 0,
) -> Assessment:
    """Evaluate a design by independence, by joint counts and by replay, as far as the data allow.

    Raises
    ------
    InvalidValueError
        When design and data do not belong together.
    """
    independent = joint = replayed = None
    if table is not None:
        independent = evaluate_design(acceptance_trie(table), design, latency)
        if table.ranks is not None:
            joint = evaluate_design(acceptance_trie(table, "joint"), design, latency)
    if record is not None:
        replayed = replay(design, record, latency, seed=seed)
    return Assessment(independent, joint, replayed)


def table_of(design: TreeDesign, where: str) -> AcceptanceTable:
    """Find the bundled table that a design was made with, by its digest.

    Raises
    ------
    DocumentError
        When no bundled table has that digest.
    """
    for name in bundled_tables():
        table, digest = load_acceptance(name)
        if digest == design.acceptance_digest:
            return table
    raise DocumentError(f"{where}: was made with a table that does not come with treeopt; give it with --acceptance")


def evaluate_tree(
    tree: str, acceptance: str | None, latency: str | None, ranks: str | None, seed: int = 0
) -> tuple[TreeDesign, Assessment]:
    """Evaluate a tree file with the given data.

    Parameters
    ----------
    tree : str
        A ``treeopt.tree/1`` file.
    acceptance : str, optional
        Bundled name or file; without it the bundled table that the tree was made with, unless ``ranks`` is given.
    latency, ranks : str, optional
        A ``treeopt.latency/1`` and a ``treeopt.ranks/1`` file.
    seed : int
        Seed of the replay's bootstrap.

    Returns
    -------
    TreeDesign, Assessment

    Raises
    ------
    DocumentError
        When a file cannot be read, or design and data do not belong together.
    """
    design = read_document(tree, TreeDesign)
    table = None
    if acceptance is not None:
        table = load_acceptance(acceptance)[0]
    elif ranks is None:
        table = table_of(design, tree)
    profile = None if latency is None else read_document(latency, LatencyProfile)
    record = None if ranks is None else read_document(ranks, RankRecord)
    try:
        assessment = assess(design, table, profile)
    except InvalidValueError as error:
        raise DocumentError(f"{tree}: {error}") from error
    if record is None:
        return design, assessment
    try:
        return design, replace(assessment, replayed=replay(design, record, profile, seed=seed))
    except InvalidValueError as error:
        raise DocumentError(f"{ranks}: {error}") from error


def assessment_document(design: TreeDesign, assessment: Assessment) -> dict[str, Any]:
    """Return an assessment as a JSON object."""
    replayed = assessment.replayed
    return {
        "sizes": list(design.sizes()),
        "pass_tokens": list(design.pass_tokens),
        "independent": None if assessment.independent is None else asdict(assessment.independent),
        "joint": None if assessment.joint is None else asdict(assessment.joint),
        "replay": None if replayed is None else {**asdict(replayed), "occupancy": replayed.occupancy},
    }
