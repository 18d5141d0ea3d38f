"""Use case: load a design together with the acceptance model to show it under."""

from dataclasses import dataclass

from treeopt.acceptance import AcceptanceTrie, acceptance_trie
from treeopt.app.evaluate import table_of
from treeopt.artifact import read_document
from treeopt.bundled import load_acceptance
from treeopt.errors import DocumentError, InvalidValueError
from treeopt.markov import evaluate_design
from treeopt.types import TreeDesign

__all__ = ["ShownDesign", "load_design"]


@dataclass(frozen=True, slots=True)
class ShownDesign:
    """A design, and what its probabilities come from.

    Parameters
    ----------
    design : TreeDesign
        The design.
    trie : AcceptanceTrie or None
        The acceptance model; None when no table is known for the design.
    model : str or None
        Name of the table's model.
    other_table : bool
        Whether the table is known not to be the one that the design was made with.
    """

    design: TreeDesign
    trie: AcceptanceTrie | None = None
    model: str | None = None
    other_table: bool = False


def load_design(tree: str, acceptance: str | None = None, acceptance_model: str | None = None) -> ShownDesign:
    """Load a design and its acceptance model.

    Parameters
    ----------
    tree : str
        A ``treeopt.tree/1`` file.
    acceptance : str, optional
        Bundled name or file; without it the bundled table that the design was made with, if it was.
    acceptance_model : {"independent", "joint"}, optional
        The design's own without it.

    Raises
    ------
    DocumentError
        When a file cannot be read, or design and table do not belong together.
    SearchError
        When the table cannot serve the acceptance model.
    """
    design = read_document(tree, TreeDesign)
    if acceptance is not None:
        table, digest = load_acceptance(acceptance)
        other_table = design.acceptance_digest not in (None, digest)
    else:
        try:
            table, other_table = table_of(design, tree), False
        except DocumentError:
            # Trees of a user's own table, and imported ones, are shown without probabilities.
            return ShownDesign(design)
    trie = acceptance_trie(table, acceptance_model or design.acceptance_model or "independent")
    try:
        evaluate_design(trie, design)
    except InvalidValueError as error:
        raise DocumentError(f"{tree}: {error}") from error
    return ShownDesign(design, trie, table.model, other_table)
