"""One small set of designs for every batch size and context length (beyond the paper).

Latency curves change with the batch and with the context, so the best tree does too. Every measured pair has its own
optimum; of these designs as few are kept as leave each pair one within a stated share of its own best. The result is a
`treeopt.types.SwitchTable`.

Nothing is interpolated: the design of a range is the one chosen at the range's upper end, which was measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treeopt.acceptance import AcceptanceTrie
from treeopt.errors import SearchError
from treeopt.markov import evaluate
from treeopt.types import LatencyProfile, SwitchEntry, SwitchTable, TreeDesign

__all__ = ["Cell", "SwitchPlan", "common_pass", "plan_switch", "run_design"]

Key = tuple[int, int]

AS_GOOD = 0.01
"""Share of a pair's best speed that is given up for a smaller set of designs."""

_ROUNDING = 1e-9
"""A pair's own optimum always serves it, whatever rounding says."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured pair of batch size and context length.

    Parameters
    ----------
    batch_size, context_len : int
        The pair.
    design : TreeDesign
        What the table uses there, with its claims for this pair.
    best_tokens_per_second : float
        Of the pair's own optimum; tokens per second of one text.
    """

    batch_size: int
    context_len: int
    design: TreeDesign
    best_tokens_per_second: float

    @property
    def loss(self) -> float:
        """Share of the pair's best speed that the table gives up."""
        return 1 - (self.design.tokens_per_second or 0.0) / self.best_tokens_per_second


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """A switching table and what it does at every measured pair.

    Parameters
    ----------
    table : SwitchTable
        Pairs of neighbours that use one design are one entry.
    cells : tuple of Cell
        Sorted by batch size, then context length.
    num_designs : int
        Different designs in the table.
    """

    table: SwitchTable
    cells: tuple[Cell, ...]
    num_designs: int


def common_pass(design: TreeDesign, occupancy: Sequence[float]) -> int:
    """Return the tokens of a pass that texts in different states share: the largest among the states that occur."""
    return max(tokens for tokens, share in zip(design.pass_tokens, occupancy, strict=True) if share > 0)


def run_design(trie: AcceptanceTrie, design: TreeDesign, latency: LatencyProfile) -> TreeDesign | None:
    """Return a design with its claims under a latency profile, run at its own pass tokens.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    design : TreeDesign
        Any design for the same guesses.
    latency : LatencyProfile
        Of any batch size. Texts of a batch share one pass, as long as the longest among them; it is taken to be that of
        the longest state that occurs, which is never too good.

    Returns
    -------
    TreeDesign or None
        None when one of its passes was not measured in this profile.
    """
    measured = {point.num_tokens for point in latency.points}
    plain = evaluate(trie, design.trees)
    passes = design.pass_tokens
    if latency.batch_size > 1:
        passes = (common_pass(design, plain.occupancy),) * len(passes)
    if any(share > 0 and tokens not in measured for tokens, share in zip(passes, plain.occupancy, strict=True)):
        return None
    evaluation = evaluate(trie, design.trees, latency, passes)
    return replace(
        design,
        acceptance_length=evaluation.acceptance_length,
        tokens_per_second=evaluation.tokens_per_second,
        speedup=evaluation.speedup,
    )


def plan_switch(
    trie: AcceptanceTrie,
    optima: Mapping[Key, TreeDesign],
    profiles: Mapping[Key, LatencyProfile],
    *,
    as_good: float = AS_GOOD,
) -> SwitchPlan:
    """Choose a small set of designs and the ranges in which each is used.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    optima : mapping of (batch size, context length) to TreeDesign
        The best design of each pair, searched with that pair's profile.
    profiles : mapping of (batch size, context length) to LatencyProfile
        All pairs of some batch sizes and some context lengths.
    as_good : float
        Share of a pair's best speed that may be given up.

    Returns
    -------
    SwitchPlan

    Raises
    ------
    SearchError
        When a pair is missing.

    Notes
    -----
    Choosing the fewest designs is a set cover; the greedy choice, most pairs first, is optimal for the handful of pairs
    that anyone measures up to a factor of ln(pairs). Ties go to the smaller total loss.
    """
    batches, contexts = sorted({b for b, _ in profiles}), sorted({c for _, c in profiles})
    missing = [(b, c) for b in batches for c in contexts if (b, c) not in profiles or (b, c) not in optima]
    if missing:
        raise SearchError(f"no profile of batch {missing[0][0]}, context {missing[0][1]}; measure every pair")
    speeds = _speeds(trie, optima, profiles)
    chosen = _cover({key: optima[key].tokens_per_second or 0.0 for key in optima}, speeds, as_good)
    use = {
        key: max(
            (design for design in chosen if key in speeds[design]),
            key=lambda design: speeds[design][key].tokens_per_second or 0.0,
        )
        for key in optima
    }
    cells = tuple(
        Cell(b, c, _claimed(speeds[use[b, c]][b, c], optima[b, c]), optima[b, c].tokens_per_second or 0.0)
        for b in batches
        for c in contexts
    )
    return SwitchPlan(_merged(cells, batches, contexts), cells, len(set(use.values())))


def _plain_key(design: TreeDesign) -> TreeDesign:
    """Return what makes a design this one and not another: trees and pass tokens, no claims."""
    return replace(
        design, method="imported", budget=None, acceptance_length=None, upper_bound=None, tokens_per_second=None,
        speedup=None, acceptance_digest=None, latency_digest=None,
    )  # fmt: skip


def _claimed(design: TreeDesign, optimum: TreeDesign) -> TreeDesign:
    """Give a design the bound and the digests of the pair it is used for."""
    names = ("method", "budget", "upper_bound", "acceptance_digest", "latency_digest", "objective", "acceptance_model")
    return replace(design, **{name: getattr(optimum, name) for name in names})


def _speeds(
    trie: AcceptanceTrie, optima: Mapping[Key, TreeDesign], profiles: Mapping[Key, LatencyProfile]
) -> dict[TreeDesign, dict[Key, TreeDesign]]:
    """Every different design, with its claims at every pair that can run it."""
    speeds: dict[TreeDesign, dict[Key, TreeDesign]] = {}
    for design in optima.values():
        key = _plain_key(design)
        if key not in speeds:
            run = {pair: run_design(trie, design, profile) for pair, profile in profiles.items()}
            speeds[key] = {pair: claimed for pair, claimed in run.items() if claimed is not None}
    return speeds


def _cover(
    best: Mapping[Key, float], speeds: Mapping[TreeDesign, Mapping[Key, TreeDesign]], as_good: float
) -> list[TreeDesign]:
    """Greedy set cover: designs until every pair has one that is as good as its own best."""
    losses = {
        design: {pair: 1 - (run.tokens_per_second or 0.0) / best[pair] for pair, run in runs.items()}
        for design, runs in speeds.items()
    }
    good = {design: {pair for pair, loss in of.items() if loss <= as_good + _ROUNDING} for design, of in losses.items()}
    open_pairs = set(best)
    chosen: list[TreeDesign] = []
    while open_pairs:
        design = max(
            good,
            key=lambda design: (
                len(good[design] & open_pairs),
                -math.fsum(losses[design][pair] for pair in good[design] & open_pairs),
            ),
        )
        if not good[design] & open_pairs:
            raise SearchError(f"no design serves batch {min(open_pairs)[0]}, context {min(open_pairs)[1]}")
        chosen.append(design)
        open_pairs -= good[design]
    return chosen


def _merged(cells: Sequence[Cell], batches: Sequence[int], contexts: Sequence[int]) -> SwitchTable:
    """Join neighbours that use one design: first along the context, then equal rows of batch sizes."""
    design = {(cell.batch_size, cell.context_len): cell.design for cell in cells}
    entries: list[SwitchEntry] = []
    row_before: list[tuple[int, TreeDesign]] = []
    for batch in batches:
        row = [
            (context, design[batch, context])
            for i, context in enumerate(contexts)
            if i + 1 == len(contexts)
            or _plain_key(design[batch, context]) != _plain_key(design[batch, contexts[i + 1]])
        ]
        if [(context, _plain_key(each)) for context, each in row] == row_before:
            del entries[-len(row) :]
        row_before = [(context, _plain_key(each)) for context, each in row]
        entries += [SwitchEntry(batch, context, each) for context, each in row]
    return SwitchTable(tuple(entries))
