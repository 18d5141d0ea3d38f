"""The values that flow through treeopt: frozen, validated when built, units in their names.

``AcceptanceTable + LatencyProfile -> search -> TreeDesign -> decode -> DecodeRun``

Terms, used the same way everywhere:

=====================  =====================================================================
distance ``j``         how many tokens past the root; prompt token ``j`` guesses distance ``j``
rank ``r``             place of a guess among the guesses for one distance, best first, from 0
path                   the ranks from the root down to a node; the root's path is empty
state ``k``            prompt tokens left by the last accepted node: the next tree's depth limit
size                   tokens of one forward pass: root + candidates + prompt tokens
=====================  =====================================================================
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from treeopt.errors import InvalidValueError

__all__ = [
    "MAX_BUDGET",
    "AcceptanceTable",
    "DecodeRun",
    "LatencyPoint",
    "LatencyProfile",
    "RankRecord",
    "SparseTree",
    "SwitchEntry",
    "SwitchTable",
    "TreeDesign",
    "TreeNode",
]

MAX_BUDGET = 4096
"""Largest budget, in tokens per forward pass, that the searches accept."""

ROW_SUM_TOLERANCE = 1e-6
"""How far a row of marginals may exceed 1: room for rounded, published figures."""

MAX_INTEGER = 2**63 - 1
"""Largest whole number in a value: what fits into 64 bits, and into every library that reads it."""

MIN_LATENCY_S, MAX_LATENCY_S = 1e-12, 1e9
"""No step is as short, or as long (30 years), as these; sums and ratios of latencies between them lose nothing."""

RULES = ("greedy", "sample", "typical")
METHODS = ("exact", "greedy", "naive", "random", "imported")
OBJECTIVES = ("tau", "tokens_per_second")
ACCEPTANCE_MODELS = ("independent", "joint")
FINISH_REASONS = ("eos", "length", "stop", "context")


def _require(condition: bool, place: str, problem: str) -> None:
    if not condition:
        raise InvalidValueError(place, problem)


def _number(value: object, place: str, *, low: float | None = None, high: float | None = None) -> None:
    """Refuse what is not a finite real number inside ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError(place, f"must be a number, not {value!r}")
    _require(isinstance(value, int) or math.isfinite(value), place, f"must be finite, not {value!r}")
    _require(low is None or value >= low, place, f"must be at least {low}, not {value!r}")
    _require(high is None or value <= high, place, f"must be at most {high}, not {value!r}")


def _integer(value: object, place: str, *, low: int | None = None, high: int | None = None) -> None:
    """Refuse what is not an integer inside ``[low, high]``."""
    _require(isinstance(value, int) and not isinstance(value, bool), place, f"must be a whole number, not {value!r}")
    _number(value, place, low=low, high=MAX_INTEGER if high is None else high)


def _positive(value: object, place: str) -> None:
    _number(value, place)
    _require(isinstance(value, int | float) and value > 0, place, f"must be above 0, not {value!r}")


def _seconds(value: object, place: str) -> None:
    _positive(value, place)
    _number(value, place, low=MIN_LATENCY_S, high=MAX_LATENCY_S)


def _plain(value: Any) -> Any:
    """Return the Python number in a scalar of numpy or torch; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def _text(value: object, place: str) -> None:
    _require(isinstance(value, str) and bool(value), place, f"must be a non-empty text, not {value!r}")
    # Control characters would steer the terminal that a name is printed on; lone surrogates cannot be written at all.
    plain = not isinstance(value, str) or not any(unicodedata.category(c) in ("Cc", "Cs") for c in value)
    _require(plain, place, f"must be one line without control characters, not {value!r}")


def _choice(value: object, place: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, place, f"must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class AcceptanceTable:
    """How often the guesses at each distance are right.

    Parameters
    ----------
    model : str
        The model whose guesses were measured.
    source : str
        Where the figures come from: a command, a file, a paper.
    rule : {"greedy", "sample", "typical"}
        The acceptance rule they were measured under.
    temperature : float
        Sampling temperature; 0 for greedy.
    num_samples : int or None
        Recorded positions; None when unknown, and then every interval is unknown too.
    marginals : tuple of tuple of float, shape (m, K)
        ``marginals[j-1][r]``: share of positions at which the rank-``r`` guess at distance ``j`` is the true token.
    ranks : tuple of tuple of int, optional
        Joint counts, each ``(r1, .., rm, count)``; rank ``K`` stands for "K or worse".
    tokens_per_prompt_token : int
        ``e``: 1, the number of ensemble prompt tokens, or 0 for guessers that need no prompt tokens.
    intervals : tuple of tuple of (float, float), shape (m, K, 2), optional
        95 % interval of each marginal.
    calibration : mapping, optional
        Free-form record of how guess probabilities were calibrated.

    Raises
    ------
    InvalidValueError
        When a rule of the table is broken; the message names the place.

    Examples
    --------
    >>> table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]])
    >>> table.num_distances, table.num_ranks
    (2, 2)
    """

    model: str
    source: str
    rule: str
    temperature: float
    num_samples: int | None
    marginals: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[int, ...], ...] | None = None
    tokens_per_prompt_token: int = 1
    intervals: tuple[tuple[tuple[float, float], ...], ...] | None = None
    calibration: Mapping[str, object] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _text(self.model, "model")
        _text(self.source, "source")
        _choice(self.rule, "rule", RULES)
        _number(self.temperature, "temperature", low=0)
        if self.num_samples is not None:
            _integer(self.num_samples, "num_samples", low=1)
        _integer(self.tokens_per_prompt_token, "tokens_per_prompt_token", low=0, high=MAX_BUDGET)
        self._check_marginals()
        if self.ranks is not None:
            self._check_ranks(self.ranks)
        if self.intervals is not None:
            self._check_intervals(self.intervals)

    @classmethod
    def from_marginals(
        cls, marginals: Iterable[Iterable[float]], *, tokens_per_prompt_token: int = 1, model: str = "unnamed"
    ) -> "AcceptanceTable":
        """Build a greedy table from bare rows of probabilities, shape (m, K); arrays are fine."""
        return cls(
            model=model,
            source="given in code",
            rule="greedy",
            temperature=0.0,
            num_samples=None,
            marginals=tuple(tuple(_plain(share) for share in row) for row in marginals),
            tokens_per_prompt_token=tokens_per_prompt_token,
        )

    @property
    def num_distances(self) -> int:
        """``m``: the farthest distance that is guessed."""
        return len(self.marginals)

    @property
    def num_ranks(self) -> int:
        """``K``: ranks recorded per distance."""
        return len(self.marginals[0])

    def _check_marginals(self) -> None:
        _require(bool(self.marginals), "marginals", "is empty; give one row of probabilities per distance")
        width = len(self.marginals[0])
        for j, row in enumerate(self.marginals):
            place = f"marginals[{j}]"
            _require(bool(row), place, "is empty; give one probability per rank")
            _require(
                len(row) == width, place, f"has {len(row)} ranks where the first row has {width}; pad with 0 or cut"
            )
            for r, share in enumerate(row):
                _number(share, f"{place}[{r}]", low=0, high=1)
            total = math.fsum(row)
            _require(
                total <= 1 + ROW_SUM_TOLERANCE * (1 + 1e-9),  # 1e-6 more than 1 has no exact binary form
                place,
                f"sums to {total:.9g}, above 1; entries are shares of positions, one rank each (cumulative figures "
                "need differences)",
            )

    def _check_ranks(self, ranks: tuple[tuple[int, ...], ...]) -> None:
        m, num_ranks = self.num_distances, self.num_ranks
        _require(bool(ranks), "ranks", "is empty; leave it out when no joint counts are known")
        counts = [[0] * (num_ranks + 1) for _ in range(m)]
        total = 0
        seen: set[tuple[int, ...]] = set()
        for i, row in enumerate(ranks):
            place = f"ranks[{i}]"
            _require(len(row) == m + 1, place, f"has {len(row)} entries; give {m} ranks and a count")
            for j, rank in enumerate(row[:-1]):
                _integer(rank, f"{place}[{j}]", low=0, high=num_ranks)
                counts[j][rank] += row[-1]
            _integer(row[-1], f"{place}[{m}]", low=1)
            _require(row[:-1] not in seen, place, f"repeats the ranks {list(row[:-1])}; add the counts up")
            seen.add(row[:-1])
            total += row[-1]
        if self.num_samples is not None:
            _require(
                total == self.num_samples,
                "ranks",
                f"counts add up to {total}, num_samples is {self.num_samples}; correct one of them",
            )
        for j, row_counts in enumerate(counts):
            for r in range(num_ranks):
                share = row_counts[r] / total
                _require(
                    abs(share - self.marginals[j][r]) <= ROW_SUM_TOLERANCE,
                    f"marginals[{j}][{r}]",
                    f"is {self.marginals[j][r]:.9g} but the joint counts in ranks give {share:.9g}; recompute one from "
                    "the other",
                )

    def _check_intervals(self, intervals: tuple[tuple[tuple[float, float], ...], ...]) -> None:
        _require(self.num_samples is not None, "intervals", "are given but num_samples is null; give the sample count")
        shape_ok = len(intervals) == self.num_distances and all(len(row) == self.num_ranks for row in intervals)
        _require(shape_ok, "intervals", f"must have {self.num_distances} rows of {self.num_ranks}, as marginals has")
        for j, row in enumerate(intervals):
            for r, pair in enumerate(row):
                place = f"intervals[{j}][{r}]"
                _require(len(pair) == 2, place, "must be [low, high]")
                _number(pair[0], f"{place}[0]", low=0, high=1)
                _number(pair[1], f"{place}[1]", low=0, high=1)
                _require(pair[0] <= pair[1], place, f"low {pair[0]} is above high {pair[1]}; swap them")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Ranks of the true next tokens, position by position, kept in order for replay.

    Parameters
    ----------
    model, source : str
        As in `AcceptanceTable`.
    rule : {"greedy", "sample", "typical"}
        Acceptance rule.
    temperature : float
        Sampling temperature; 0 for greedy.
    max_rank : int
        ``K``; an entry of ``K`` means "K or worse, or past the end of the text".
    sequences : tuple, shape (num_sequences, positions, m)
        ``sequences[s][i][j-1]``: rank, among the guesses made at new token ``i``, of new token ``i + j``.
    probabilities : tuple of the same shape, optional
        The guesser's probability of that token.
    """

    model: str
    source: str
    rule: str
    temperature: float
    max_rank: int
    sequences: tuple[tuple[tuple[int, ...], ...], ...]
    probabilities: tuple[tuple[tuple[float, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        _text(self.model, "model")
        _text(self.source, "source")
        _choice(self.rule, "rule", RULES)
        _number(self.temperature, "temperature", low=0)
        _integer(self.max_rank, "max_rank", low=1)
        widths = {len(entry) for sequence in self.sequences for entry in sequence}
        _require(bool(widths), "sequences", "holds no position; record at least one")
        _require(len(widths) == 1, "sequences", f"mixes entries of {sorted(widths)} ranks; all need m ranks")
        _require(min(widths) >= 1, "sequences", "has entries without ranks; give m ranks each")
        for s, sequence in enumerate(self.sequences):
            for i, entry in enumerate(sequence):
                for j, rank in enumerate(entry):
                    _integer(rank, f"sequences[{s}][{i}][{j}]", low=0, high=self.max_rank)
        if self.probabilities is not None:
            self._check_probabilities(self.probabilities)

    @property
    def num_distances(self) -> int:
        """``m``: ranks per position."""
        return next(len(entry) for sequence in self.sequences for entry in sequence)

    def _check_probabilities(self, probabilities: tuple[tuple[tuple[float, ...], ...], ...]) -> None:
        shape = [[len(entry) for entry in sequence] for sequence in self.sequences]
        given = [[len(entry) for entry in sequence] for sequence in probabilities]
        _require(shape == given, "probabilities", "must have the shape of sequences")
        for s, sequence in enumerate(probabilities):
            for i, entry in enumerate(sequence):
                for j, share in enumerate(entry):
                    _number(share, f"probabilities[{s}][{i}][{j}]", low=0, high=1)


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """Latency of one decoding step at one input length.

    Parameters
    ----------
    num_tokens : int
        Tokens of the forward pass.
    median_s : float
        Median step latency, seconds.
    iqr_s : float, optional
        Interquartile range, seconds.
    num_samples : int, optional
        Timed steps.
    samples_s : tuple of float, optional
        Every timed step, seconds, in the order taken.
    """

    num_tokens: int
    median_s: float
    iqr_s: float | None = None
    num_samples: int | None = None
    samples_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _integer(self.num_tokens, "num_tokens", low=1)
        _seconds(self.median_s, "median_s")
        if self.iqr_s is not None:
            _number(self.iqr_s, "iqr_s", low=0)
        if self.num_samples is not None:
            _integer(self.num_samples, "num_samples", low=1)
        if self.samples_s is not None:
            _require(bool(self.samples_s), "samples_s", "is empty; leave it out")
            for i, sample_s in enumerate(self.samples_s):
                _seconds(sample_s, f"samples_s[{i}]")
            _require(
                self.num_samples in (None, len(self.samples_s)),
                "num_samples",
                f"is {self.num_samples} but samples_s holds {len(self.samples_s)}; correct one of them",
            )


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """Step latency ``L(n)`` of one model on one device, at fixed dtype, batch size and context.

    Parameters
    ----------
    device : mapping
        Identity of the device; at least ``name``.
    model, dtype, attention, graph_mode : str
        What ran: model, number format, attention backend, and eager, compiled or cuda_graph.
    batch_size : int
        Rows decoded together.
    context_len : int
        Tokens already in the KV cache.
    points : tuple of LatencyPoint
        Strictly increasing in ``num_tokens``, starting at 1.
    cache, kernels : str, optional
        KV-cache kind; name of the plan of linear-layer kernels.
    versions : mapping of str to str, optional
        Libraries and drivers.
    flags : tuple of str, optional
        What was odd about the measurement: noisy, throttled, contended, drifted.
    complete : bool
        False while points are still missing; a partial profile is never used by a search on its own.

    Examples
    --------
    >>> profile = LatencyProfile.from_medians({1: 0.020, 4: 0.021, 8: 0.030})
    >>> profile.cheapest(3, budget=8).num_tokens
    4
    """

    device: Mapping[str, object] = field(hash=False)
    model: str
    dtype: str
    batch_size: int
    context_len: int
    attention: str
    graph_mode: str
    points: tuple[LatencyPoint, ...]
    cache: str | None = None
    kernels: str | None = None
    versions: Mapping[str, str] | None = field(default=None, hash=False)
    flags: tuple[str, ...] | None = None
    complete: bool = True

    def __post_init__(self) -> None:
        _text(self.device.get("name"), "device.name")
        for name in ("model", "dtype", "attention", "graph_mode"):
            _text(getattr(self, name), name)
        _integer(self.batch_size, "batch_size", low=1)
        _integer(self.context_len, "context_len", low=0)
        _require(bool(self.points), "points", "is empty; measure at least num_tokens 1")
        _require(
            self.points[0].num_tokens == 1,
            "points[0].num_tokens",
            f"is {self.points[0].num_tokens}; the first point must be 1 token, plain decoding, to compare with",
        )
        for i, (before, point) in enumerate(zip(self.points, self.points[1:], strict=False), start=1):
            _require(
                point.num_tokens > before.num_tokens,
                f"points[{i}].num_tokens",
                f"is {point.num_tokens} after {before.num_tokens}; sort the points and drop repeats",
            )

    @classmethod
    def from_medians(cls, medians_s: Mapping[int, float], *, model: str = "unnamed") -> "LatencyProfile":
        """Build a profile from a mapping of tokens to median seconds."""
        return cls(
            device={"name": "unnamed"},
            model=model,
            dtype="float32",
            batch_size=1,
            context_len=0,
            attention="sdpa",
            graph_mode="eager",
            points=tuple(LatencyPoint(_plain(n), _plain(medians_s[n])) for n in sorted(medians_s)),
        )

    def median_s(self, num_tokens: int) -> float:
        """Return the measured median at ``num_tokens``, seconds.

        Raises
        ------
        InvalidValueError
            When that size was not measured: latencies are never interpolated.
        """
        for point in self.points:
            if point.num_tokens == num_tokens:
                return point.median_s
        raise InvalidValueError(
            "points",
            f"no measurement at {num_tokens} tokens ({len(self.points)} sizes up to {self.points[-1].num_tokens} were "
            "measured); profile that size, or pad the pass to a measured one",
        )

    def cheapest(self, size: int, budget: int) -> LatencyPoint | None:
        """Return the cheapest measured point a pass of ``size`` tokens can be padded to.

        Parameters
        ----------
        size : int
            Tokens the tree needs.
        budget : int
            Cap on the padded pass.

        Returns
        -------
        LatencyPoint or None
            The least median among measured sizes in ``[size, budget]``, the smallest size on ties; None when no such
            size was measured.
        """
        fits = [point for point in self.points if size <= point.num_tokens <= budget]
        return min(fits, key=lambda point: (point.median_s, point.num_tokens), default=None)


@dataclass(frozen=True, slots=True, order=True)
class TreeNode:
    """One verified position of a tree: the root (empty path) or a candidate.

    Parameters
    ----------
    path : tuple of int
        Ranks from the root down to this node.
    prompt_tokens : int
        Prompt tokens that hang on this node and prepare the next step's guesses.
    """

    path: tuple[int, ...]
    prompt_tokens: int

    def __post_init__(self) -> None:
        for i, rank in enumerate(self.path):
            _integer(rank, f"path[{i}]", low=0)
        _integer(self.prompt_tokens, "prompt_tokens", low=0)

    @property
    def depth(self) -> int:
        """Candidates from the root to here."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class SparseTree:
    """The tree of one state: its root and candidates, sorted by depth, then path.

    Raises
    ------
    InvalidValueError
        When the root or a parent is missing, a path is repeated or the order is off.

    Examples
    --------
    >>> tree = SparseTree.from_prompt_tokens({(): 2, (0,): 1, (1,): 1})
    >>> tree.size(tokens_per_prompt_token=1)
    7
    """

    nodes: tuple[TreeNode, ...]

    def __post_init__(self) -> None:
        _require(bool(self.nodes) and self.nodes[0].path == (), "nodes[0]", "must be the root, with the path []")
        known: set[tuple[int, ...]] = set()
        for i, node in enumerate(self.nodes):
            place = f"nodes[{i}]"
            _require(node.path not in known, place, f"repeats the path {list(node.path)}; keep one of the two")
            _require(
                not node.path or node.path[:-1] in known,
                place,
                f"path {list(node.path)} has no parent before it; add {list(node.path[:-1])} and sort by depth",
            )
            known.add(node.path)
        keys = [(node.depth, node.path) for node in self.nodes]
        _require(keys == sorted(keys), "nodes", "must be sorted by depth, then path")

    @classmethod
    def from_prompt_tokens(cls, prompt_tokens: Mapping[tuple[int, ...], int]) -> "SparseTree":
        """Build a tree from a mapping of path to prompt tokens, in any order."""
        paths = sorted(prompt_tokens, key=lambda path: (len(path), path))
        return cls(tuple(TreeNode(path, prompt_tokens[path]) for path in paths))

    @property
    def depth(self) -> int:
        """Depth of the deepest candidate."""
        return self.nodes[-1].depth

    @property
    def num_candidates(self) -> int:
        """Nodes besides the root."""
        return len(self.nodes) - 1

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens on all nodes, the root's included."""
        return sum(node.prompt_tokens for node in self.nodes)

    def size(self, tokens_per_prompt_token: int) -> int:
        """Tokens of the forward pass: every node and ``e`` tokens per prompt token."""
        return len(self.nodes) + tokens_per_prompt_token * self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class TreeDesign:
    """One tree per state, with what a search claims for it.

    Parameters
    ----------
    trees : tuple of SparseTree
        ``trees[k]`` is used in state ``k``; its depth is at most ``k``. Length m + 1.
    budget : int or None
        Cap on every state's forward pass, tokens.
    method : {"exact", "greedy", "naive", "random", "imported"}
        Where the design comes from.
    objective : {"tau", "tokens_per_second"}
        What was maximised.
    acceptance_model : {"independent", "joint"} or None
        The model that ``acceptance_length`` is computed under.
    tokens_per_prompt_token : int
        ``e``.
    pass_tokens : tuple of int
        Tokens each state's pass is padded to, at least its size.
    acceptance_length : float or None
        ``tau = R(T)``, tokens per step.
    upper_bound : float or None
        No design under the budget beats this, in the objective's unit.
    tokens_per_second, speedup : float or None
        Predicted with the latency profile; None without one.
    acceptance_digest, latency_digest : str or None
        SHA-256 of the canonical JSON of the inputs.
    """

    trees: tuple[SparseTree, ...]
    budget: int | None
    method: str
    objective: str
    acceptance_model: str | None
    tokens_per_prompt_token: int
    pass_tokens: tuple[int, ...]
    acceptance_length: float | None
    upper_bound: float | None
    tokens_per_second: float | None = None
    speedup: float | None = None
    acceptance_digest: str | None = None
    latency_digest: str | None = None

    def __post_init__(self) -> None:
        _choice(self.method, "method", METHODS)
        _choice(self.objective, "objective", OBJECTIVES)
        if self.budget is not None:
            _integer(self.budget, "budget", low=1, high=MAX_BUDGET)
        if self.acceptance_model is not None:
            _choice(self.acceptance_model, "acceptance_model", ACCEPTANCE_MODELS)
        _integer(self.tokens_per_prompt_token, "tokens_per_prompt_token", low=0)
        for name in ("acceptance_length", "upper_bound", "tokens_per_second", "speedup"):
            if getattr(self, name) is not None:
                _positive(getattr(self, name), name)
        if self.method != "imported":
            for name in ("budget", "acceptance_model", "acceptance_length", "upper_bound", "acceptance_digest"):
                _require(getattr(self, name) is not None, name, "may be null only for method imported")
        self._check_trees()

    @property
    def num_distances(self) -> int:
        """``m``: the highest state."""
        return len(self.trees) - 1

    def sizes(self) -> tuple[int, ...]:
        """Tokens each state's tree needs, before padding."""
        return tuple(tree.size(self.tokens_per_prompt_token) for tree in self.trees)

    def _check_trees(self) -> None:
        m = self.num_distances
        _require(m >= 1, "states", f"has {len(self.trees)} states; a design has the states 0 to m, with m at least 1")
        _require(len(self.pass_tokens) == m + 1, "pass_tokens", f"must name each of the {m + 1} states")
        for k, tree in enumerate(self.trees):
            _require(
                tree.depth <= k,
                f"states.{k}",
                f"has a candidate at depth {tree.depth}; state {k} has guesses for {k} distances only",
            )
            for i, node in enumerate(tree.nodes):
                place = f"states.{k}[{i}].prompt_tokens"
                _integer(node.prompt_tokens, place, low=0, high=m)
                if self.tokens_per_prompt_token == 0:
                    _require(
                        node.prompt_tokens == m, place, f"must be {m}: guesses cost nothing here, so none is left out"
                    )
            size = tree.size(self.tokens_per_prompt_token)
            _integer(self.pass_tokens[k], f"pass_tokens.{k}", low=size, high=self.budget)


@dataclass(frozen=True, slots=True)
class SwitchEntry:
    """The design for one range of batch sizes and context lengths.

    Parameters
    ----------
    batch_max : int
        Texts decoded together, at most.
    context_max : int
        Tokens in the KV cache of the longest text, at most.
    tree : TreeDesign
        What decodes there.
    """

    batch_max: int
    context_max: int
    tree: TreeDesign

    def __post_init__(self) -> None:
        _integer(self.batch_max, "batch_max", low=1)
        _integer(self.context_max, "context_max", low=1)


@dataclass(frozen=True, slots=True)
class SwitchTable:
    """Designs to switch between while decoding, by batch size and context length.

    Parameters
    ----------
    entries : tuple of SwitchEntry
        Sorted by ``batch_max``, then ``context_max``, no pair twice; every ``batch_max`` reaches the same context, and
        all trees are for the same guesses. So the first entry with ``batch <= batch_max`` and
        ``context <= context_max`` is the one that applies.

    Raises
    ------
    InvalidValueError
        When a rule is broken; the message names the entry.
    """

    entries: tuple[SwitchEntry, ...]

    def __post_init__(self) -> None:
        _require(bool(self.entries), "entries", "is empty; give at least one design")
        keys = [(entry.batch_max, entry.context_max) for entry in self.entries]
        for i, (before, key) in enumerate(pairwise(keys), start=1):
            _require(
                key > before,
                f"entries[{i}]",
                f"has batch_max {key[0]}, context_max {key[1]} after {before[0]}, {before[1]}; sort by batch_max, then "
                "context_max, and keep one entry of each",
            )
        reach = {entry.batch_max: entry.context_max for entry in self.entries}
        farthest = max(reach.values())
        first = self.entries[0].tree
        for i, entry in enumerate(self.entries):
            _require(
                reach[entry.batch_max] == farthest,
                f"entries[{i}]",
                f"batch_max {entry.batch_max} ends at context_max {reach[entry.batch_max]}, others at {farthest}; let "
                "all end at the same context",
            )
            for name in ("num_distances", "tokens_per_prompt_token"):
                ours, theirs = getattr(entry.tree, name), getattr(first, name)
                _require(
                    ours == theirs,
                    f"entries[{i}].tree",
                    f"has {name} {ours}, the first tree has {theirs}; all trees must be for the same guesses",
                )

    @property
    def num_distances(self) -> int:
        """``m``, the same in all trees."""
        return self.entries[0].tree.num_distances

    @property
    def tokens_per_prompt_token(self) -> int:
        """``e``, the same in all trees."""
        return self.entries[0].tree.tokens_per_prompt_token

    def place(self, batch_size: int, context_len: int) -> int:
        """Return the index of the entry that applies.

        Past the largest batch size or context length the nearest range applies: the text is the same whatever the
        tree, only its speed was not predicted there.

        Examples
        --------
        >>> from treeopt import AcceptanceTable, search
        >>> short, long = (search(AcceptanceTable.from_marginals([[0.5]]), n) for n in (4, 1))
        >>> table = SwitchTable((SwitchEntry(1, 128, short), SwitchEntry(1, 1024, long)))
        >>> [table.place(1, context_len) for context_len in (100, 128, 129, 5000)]
        [0, 0, 1, 1]
        """
        batch_max = max(entry.batch_max for entry in self.entries)
        context_max = max(entry.context_max for entry in self.entries)
        batch, context = min(batch_size, batch_max), min(context_len, context_max)
        return next(
            i for i, entry in enumerate(self.entries) if batch <= entry.batch_max and context <= entry.context_max
        )


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """What one decoded text took.

    Parameters
    ----------
    model : str
        The model that decoded.
    guesses : str
        Source of guesses: prompt, free, lookup, or none for plain decoding.
    tree_digest : str or None
        Digest of the tree design; None for plain decoding.
    num_prompt_tokens, num_new_tokens, num_steps : int
        Tokens read, tokens written after them, forward passes after prefill.
    steps_per_state : tuple of int
        Passes spent in each state.
    prefill_s, decode_s : float
        Wall-clock time before and after the first new token, seconds.
    forward_s, propose_s, verify_s, commit_s : float or None
        Parts of ``decode_s``, seconds, where they were timed apart.
    finish_reason : {"eos", "length", "stop", "context"}
        Why it ended.
    """

    model: str
    guesses: str
    tree_digest: str | None
    num_prompt_tokens: int
    num_new_tokens: int
    num_steps: int
    steps_per_state: tuple[int, ...]
    prefill_s: float
    decode_s: float
    finish_reason: str
    forward_s: float | None = None
    propose_s: float | None = None
    verify_s: float | None = None
    commit_s: float | None = None

    def __post_init__(self) -> None:
        _text(self.model, "model")
        _text(self.guesses, "guesses")
        _choice(self.finish_reason, "finish_reason", FINISH_REASONS)
        for name in ("num_prompt_tokens", "num_new_tokens", "num_steps"):
            _integer(getattr(self, name), name, low=0)
        for k, steps in enumerate(self.steps_per_state):
            _integer(steps, f"steps_per_state[{k}]", low=0)
        for name in ("prefill_s", "decode_s"):
            _number(getattr(self, name), name, low=0)
        for name in ("forward_s", "propose_s", "verify_s", "commit_s"):
            if getattr(self, name) is not None:
                _number(getattr(self, name), name, low=0)
        _require(
            sum(self.steps_per_state) in (0, self.num_steps),
            "steps_per_state",
            f"adds up to {sum(self.steps_per_state)}, num_steps is {self.num_steps}",
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Achieved acceptance length; None without a step. The first new token is prefill's."""
        return (self.num_new_tokens - 1) / self.num_steps if self.num_steps else None
