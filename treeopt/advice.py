"""A tree, a chain or nothing: designs beside each other, with the sampling error of everything they rest on.

The contenders are plain decoding, the best chain, the best tree with every state at the size that suits it, and the
best tree at each measured size (the paper's Figure 8b). They are judged on common draws (`treeopt.uncertainty`). Two
designs are *tied* when the 95 % interval of the ratio of their speeds holds 1; then it is said how many more samples
would tell them apart, if the ratio is what it looks like.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treeopt.acceptance import AcceptanceTrie
from treeopt.exact import ExactResult, exact_trees
from treeopt.markov import evaluate
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord, SparseTree, TreeDesign
from treeopt.uncertainty import Draws, draw_acceptance, draw_latency, speedups

__all__ = ["BreakEven", "Contender", "Verdict", "break_even", "chain_trie", "contenders", "judge", "kind_of"]

Floats = npt.NDArray[np.float64]

Z = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""

SAME = 1e-9
"""Designs whose speeds differ by less than this, relatively, are the same speed; no number of samples parts them."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode, and how it stands against the best one.

    Parameters
    ----------
    name : str
        For people.
    kind : {"none", "chain", "tree"}
        Shape of the trees that occur.
    design : TreeDesign
        The design, with the pass tokens it is judged at.
    acceptance_length : float
        Tokens per step.
    speedup : float
        Over plain decoding.
    low, high : float or None
        95 % interval of the speedup; None where the sampling error of an input is unknown.
    tied : bool or None
        Whether the data cannot tell it from the best one; None when that is unknown.
    times_samples : float or None
        How many times as many samples, of both kinds, would tell it from the best one; 1 or less when they do already,
        None when unknown or when no number would.
    latency_share : float or None
        Share of the doubt, as variance of the log ratio, that step times account for; the rest is acceptance.
    """

    name: str
    kind: str
    design: TreeDesign
    acceptance_length: float
    speedup: float
    low: float | None = None
    high: float | None = None
    tied: bool | None = None
    times_samples: float | None = None
    latency_share: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to use, and everything it was weighed against.

    Parameters
    ----------
    use : {"none", "chain", "tree"}
        The advice: the fastest contender, unless the data do not show that it beats plain decoding.
    best : Contender
        The fastest by the estimate, whatever the advice.
    contenders : tuple of Contender
        All, fastest first.
    basis : {"replay", "independent", "joint"}
        Where acceptance comes from.
    unit : {"sequences", "positions"} or None
        What was resampled; None when the acceptance data give no sampling error.
    num_samples, num_steps : int or None
        Of these; fewest timed steps behind a latency that matters. None when unknown.
    """

    use: str
    best: Contender
    contenders: tuple[Contender, ...]
    basis: str
    unit: str | None
    num_samples: int | None
    num_steps: int | None

    @property
    def interval_known(self) -> bool:
        """Whether both inputs give their sampling error."""
        return self.unit is not None and self.num_steps is not None


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What speculation must reach, and does, under one latency profile.

    Parameters
    ----------
    batch_size, context_len : int
        The profile's.
    num_tokens : int
        Size of the best pass that speculates.
    acceptance_length : float
        Tokens per step that trees of this size reach.
    needed : float
        Tokens per step at which they would break even, ``L(n) / L(1)``.
    speedup : float
        Of the optimum over all sizes, 1 when nothing beats plain decoding.
    kind : {"none", "chain", "tree"}
        Shape of that optimum.
    """

    batch_size: int
    context_len: int
    num_tokens: int
    acceptance_length: float
    needed: float
    speedup: float
    kind: str


def chain_trie(trie: AcceptanceTrie) -> AcceptanceTrie:
    """Keep only the most probable child of every node: trees of this trie are chains."""
    children = tuple(
        {} if not below else dict([max(below.items(), key=lambda item: (item[1][0], -item[0]))])
        for below in trie.children
    )
    return replace(trie, children=children)


def kind_of(trees: Sequence[SparseTree], occupancy: Sequence[float]) -> str:
    """Return none, chain or tree: the shape of the trees of the states that occur."""
    used = [tree for tree, share in zip(trees, occupancy, strict=True) if share > 0]
    if all(tree.num_candidates == 0 for tree in used):
        return "none"
    return "chain" if all(tree.num_candidates == tree.depth for tree in used) else "tree"


def contenders(
    trie: AcceptanceTrie,
    budget: int,
    latency: LatencyProfile,
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[str, TreeDesign], ...]:
    """Return the designs worth comparing under a budget, each with a name; plain decoding is the first.

    Raises
    ------
    SearchError
        As `treeopt.exact.exact_trees`.
    """
    held = trie.num_distances if trie.tokens_per_prompt_token == 0 else 0
    root = SparseTree.from_prompt_tokens({(): held})
    sizes = [point.num_tokens for point in latency.points if 1 < point.num_tokens <= budget]
    m = trie.num_distances
    designs = [("plain", (root,) * (m + 1), (1,) * (m + 1))]
    seen = set()

    def add(name: str, result: ExactResult, passes: tuple[int, ...]) -> None:
        occupancy = result.evaluation.occupancy
        kind = kind_of(result.trees, occupancy)
        # Designs that differ in states that never occur are one.
        key = tuple((result.trees[k], passes[k]) for k in range(m + 1) if occupancy[k] > 0)
        if kind != "none" and key not in seen:
            seen.add(key)
            designs.append((name.format(kind=kind), result.trees, passes))
        if progress is not None:
            progress(name.format(kind=kind))

    for of in (trie, chain_trie(trie)):
        result = exact_trees(of, budget, latency)
        add("best {kind}", result, result.evaluation.pass_tokens)
    for size in sizes:
        add(f"{{kind}} of {size} tokens", exact_trees(trie, size), (size,) * (m + 1))
    return tuple((name, _design(trie, trees, passes)) for name, trees, passes in designs)


def _design(trie: AcceptanceTrie, trees: tuple[SparseTree, ...], passes: tuple[int, ...]) -> TreeDesign:
    return TreeDesign(
        trees=trees,
        budget=None,
        method="imported",
        objective="tokens_per_second",
        acceptance_model=trie.name,
        tokens_per_prompt_token=trie.tokens_per_prompt_token,
        pass_tokens=passes,
        acceptance_length=None,
        upper_bound=None,
    )


def judge(
    designs: Sequence[tuple[str, TreeDesign]],
    trie: AcceptanceTrie,
    table: AcceptanceTable,
    latency: LatencyProfile,
    record: RankRecord | None = None,
    *,
    seed: int = 0,
) -> Verdict:
    """Weigh designs against each other and against plain decoding, which must be among them.

    Parameters
    ----------
    designs : sequence of (str, TreeDesign)
        From `contenders`; pass tokens of states that occur must be measured.
    trie, table : AcceptanceTrie, AcceptanceTable
        The acceptance model and the table it reads.
    latency : LatencyProfile
        Step latencies.
    record : RankRecord, optional
        Replayed in place of the model; its sequences carry the acceptance data's sampling error.
    seed : int
        Of the bootstrap.

    Raises
    ------
    InvalidValueError
        When designs and data do not belong together.
    """
    draws = draw_acceptance([design for _, design in designs], trie, table, record, seed=seed)
    sizes = {1} | {
        tokens
        for (_, design), behaviour in zip(designs, draws.behaviours, strict=True)
        for tokens, share in zip(design.pass_tokens, behaviour.occupancy, strict=True)
        if share > 0
    }
    drawn, num_steps = draw_latency(latency, sizes, seed=seed)
    judged = [
        speedups(behaviour, design.pass_tokens, latency, drawn)
        for (_, design), behaviour in zip(designs, draws.behaviours, strict=True)
    ]
    known = draws.unit is not None and num_steps is not None
    kinds = [
        kind_of(design.trees, behaviour.occupancy.tolist())
        for (_, design), behaviour in zip(designs, draws.behaviours, strict=True)
    ]
    # Among equals nothing comes before a chain, a chain before a tree.
    order = sorted(range(len(designs)), key=lambda i: (-judged[i][0], ("none", "chain", "tree").index(kinds[i])))
    top = order[0]
    ranked = []
    for i in order:
        name, design = designs[i]
        low, high = np.quantile(judged[i][3], [0.025, 0.975])
        contender = Contender(name, kinds[i], design, draws.behaviours[i].tokens, judged[i][0])
        if known:
            tied, times, share = _apart(judged[top], judged[i])
            contender = replace(
                contender, low=float(low), high=float(high), tied=tied, times_samples=times, latency_share=share
            )
        ranked.append(contender)
    return _verdict(tuple(ranked), draws, num_steps)


def _verdict(ranked: tuple[Contender, ...], draws: Draws, num_steps: int | None) -> Verdict:
    best = ranked[0]
    plain = next(contender for contender in ranked if contender.kind == "none")
    # Speculation is advised only when the data show that it beats plain decoding.
    use = best.kind if best.low is None or (best.low > 1 and not plain.tied) else "none"
    return Verdict(use, best, ranked, draws.basis, draws.unit, draws.num_samples, num_steps)


def _apart(
    best: tuple[float, Floats, Floats, Floats], other: tuple[float, Floats, Floats, Floats]
) -> tuple[bool, float | None, float | None]:
    """Return whether two designs are tied, how many times the samples part them, and the latencies' share of doubt."""
    ratio = math.log(best[0] / other[0])
    acceptance, latency, both = (np.log(ours / theirs) for ours, theirs in zip(best[1:], other[1:], strict=True))
    low, high = np.quantile(both, [0.025, 0.975])
    variances = float(acceptance.var()), float(latency.var())
    doubt = sum(variances) if sum(variances) > SAME**2 else 0.0
    # A design is always tied with itself and with whatever is as fast in every draw.
    tied = bool(low <= SAME and high >= -SAME)
    times = (Z / ratio) ** 2 * doubt if abs(ratio) > SAME else None
    return tied, times, variances[1] / doubt if doubt > 0 else None


def break_even(trie: AcceptanceTrie, budget: int, profiles: Sequence[LatencyProfile]) -> tuple[BreakEven, ...]:
    """Say where speculation pays: the tokens per step that it needs, and has, under every profile.

    Parameters
    ----------
    trie : AcceptanceTrie
        The acceptance model.
    budget : int
        Cap on the tokens of a pass.
    profiles : sequence of LatencyProfile
        Profiles of several batch sizes and context lengths; those without a size from 2 to ``budget`` are left out.

    Returns
    -------
    tuple of BreakEven
        Sorted by batch size, then context length.
    """
    reach: dict[int, float] = {}
    rows = []
    for profile in sorted(profiles, key=lambda each: (each.batch_size, each.context_len)):
        points = [point for point in profile.points if 1 < point.num_tokens <= budget]
        if not points:
            continue
        for point in points:
            if point.num_tokens not in reach:
                trees = exact_trees(trie, point.num_tokens).trees
                reach[point.num_tokens] = evaluate(trie, trees).acceptance_length
        plain_s = profile.median_s(1)
        best = max(points, key=lambda point: reach[point.num_tokens] / point.median_s)
        optimum = exact_trees(trie, budget, profile)
        rows.append(
            BreakEven(
                batch_size=profile.batch_size,
                context_len=profile.context_len,
                num_tokens=best.num_tokens,
                acceptance_length=reach[best.num_tokens],
                needed=best.median_s / plain_s,
                speedup=optimum.evaluation.speedup or 1.0,
                kind=kind_of(optimum.trees, optimum.evaluation.occupancy),
            )
        )
    return tuple(rows)
