"""Use case: search inside the limits of another engine, and say the answer in its own words.

========================  ===============================================  ==========================
target                    what the engine can run                          what is printed
========================  ===============================================  ==========================
``medusa``                any tree of ranks 0 to 9 (Hydra too)             ``medusa_choices``
``eagle``                 children without gaps, ranks 0 to 9              ``eagle_choices``
``sequoia``               children without gaps                            growmap, ``.pt``
``umbrella``              children without gaps                            growmap, JSON
``vllm``                  every node of a level has as many children       ``speculative_token_tree``
``sglang``                the best tokens of a pool of drafts              three flags
``tensorrt-llm``          the same, at most topK tokens per level          three settings
``llama.cpp``             chains                                           two flags
``vllm-schedule``         chains, one length per batch size                ranges
``tensorrt-llm-schedule`` chains, one length per batch size                mapping
========================  ===============================================  ==========================

None of them has prompt tokens: a pass holds the root and the candidates, and the next step always has all guesses. So
there is one state, and the objective is expected tokens over the time of one step. Only measured sizes are promised,
because these engines run exactly the tokens they are told.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treeopt.acceptance import AcceptanceTrie, acceptance_trie
from treeopt.app.settings import Best, Clock, best_chain, best_pool, best_tree, best_widths, break_even
from treeopt.errors import SearchError
from treeopt.formats import choices, growmap, llama_cpp, sglang, tensorrt_llm, vllm
from treeopt.types import MAX_BUDGET, AcceptanceTable, LatencyProfile

__all__ = ["TARGETS", "TargetResult", "search_for_target"]

Path = tuple[int, ...]

TARGETS = (
    "eagle",
    "llama.cpp",
    "medusa",
    "sequoia",
    "sglang",
    "tensorrt-llm",
    "tensorrt-llm-schedule",
    "umbrella",
    "vllm",
    "vllm-schedule",
)
"""What `search_for_target` can search for."""

_SHAPE_FAMILIES = ("vllm", "sglang", "tensorrt-llm")
_SCHEDULES = ("vllm-schedule", "tensorrt-llm-schedule")


@dataclass(frozen=True, slots=True)
class TargetResult:
    """The answer in an engine's own syntax.

    Parameters
    ----------
    content : str or bytes
        What the engine reads, and nothing else. Empty when no speculation is fastest and the engine has no words for
        it. Bytes for ``sequoia``.
    expected_tokens : float
        ``f``, expected tokens per step; of schedules, at the smallest batch size.
    speedup : float or None
        Predicted, over decoding without speculation; None without a latency profile.
    notes : tuple of str
        What a person should know: the prediction, settings that must stand beside the answer.
    """

    content: str | bytes
    expected_tokens: float
    speedup: float | None
    notes: tuple[str, ...]


def search_for_target(
    target: str,
    table: AcceptanceTable,
    budget: int,
    latencies: Sequence[LatencyProfile] = (),
    *,
    acceptance_model: str = "independent",
    max_depth: int | None = None,
    draft_s: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> TargetResult:
    """Find the fastest tree, chain or setting that an engine can run.

    Parameters
    ----------
    target : str
        One of `TARGETS`.
    table : AcceptanceTable
        How often the engine's guesses are right. Prompt tokens are not counted, whatever the table says of them.
    budget : int
        Cap on the tokens of one sequence's verifying pass, the root included.
    latencies : sequence of LatencyProfile
        At most one; for schedules one per batch size. Without any the objective is tokens per step.
    acceptance_model : {"independent", "joint"}
        Joint counts serve trees and chains, not the shape families of vllm, sglang and tensorrt-llm.
    max_depth : int, optional
        Heads of the model, or the most draft steps; the table's distances without it.
    draft_s : float
        Seconds per level of the draft, for engines whose draft model runs once per level. Needs a latency profile.
    progress : callable, optional
        Called with one line now and then.

    Returns
    -------
    TargetResult

    Raises
    ------
    SearchError
        When the question cannot be answered as it was asked.

    Notes
    -----
    The answer is the best under the acceptance model. Engines with dynamic trees (sglang, tensorrt-llm) choose the
    candidates of each step by the draft's own probabilities; they are rated by the tree that average ones give.

    Examples
    --------
    >>> table = AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]], tokens_per_prompt_token=0)
    >>> search_for_target("medusa", table, 4).content
    '[[0], [1], [0, 0]]'
    """
    _check_request(target, budget, latencies, acceptance_model, draft_s)
    usable = _usable_part(table, target, max_depth)
    if progress is not None:
        progress(f"best setting for {target} within {budget} tokens")
    found = _search(target, usable, budget, latencies, acceptance_model, draft_s)
    if not table.tokens_per_prompt_token:
        return found
    measured = f"the table was measured with prompt tokens; this holds if {target}'s guesses are right as often"
    return replace(found, notes=(*found.notes, measured))


def _search(
    target: str,
    table: AcceptanceTable,
    budget: int,
    latencies: Sequence[LatencyProfile],
    acceptance_model: str,
    draft_s: float,
) -> TargetResult:
    trie = acceptance_trie(table, acceptance_model, consecutive=target not in ("medusa", "llama.cpp"))
    if target in _SCHEDULES:
        return _schedule(target, trie, budget, latencies, draft_s)
    clock = Clock(budget, latencies[0] if latencies else None, draft_s)
    if target == "vllm":
        return _vllm(table, clock)
    if target == "sglang":
        return _sglang(table, clock)
    if target == "tensorrt-llm":
        return _tensorrt_llm(table, clock)
    if target == "llama.cpp":
        return _llama_cpp(trie, clock)
    return _static_tree(target, trie, clock)


def _check_request(
    target: str, budget: int, latencies: Sequence[LatencyProfile], acceptance_model: str, draft_s: float
) -> None:
    if target not in TARGETS:
        raise SearchError(f"target: must be one of {', '.join(TARGETS)}, not {target!r}")
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= MAX_BUDGET:
        raise SearchError(f"budget: must be a whole number from 1 to {MAX_BUDGET} tokens, not {budget!r}")
    if not (math.isfinite(draft_s) and draft_s >= 0):
        raise SearchError(f"draft seconds: must be 0 or more, not {draft_s}")
    if draft_s and not latencies:
        raise SearchError("draft seconds: need a latency profile to compare with; give --latency")
    if target in _SCHEDULES:
        if not latencies:
            raise SearchError(f"target {target}: needs latency profiles, one for each batch size; give --latency")
        sizes = [profile.batch_size for profile in latencies]
        if len(set(sizes)) != len(sizes):
            raise SearchError(
                f"target {target}: two profiles have the same batch size ({sorted(sizes)}); give one each"
            )
    elif len(latencies) > 1:
        raise SearchError(f"target {target}: takes one latency profile, not {len(latencies)}; schedules take several")
    if acceptance_model == "joint" and target in _SHAPE_FAMILIES:
        raise SearchError(f"acceptance model joint: target {target} is searched under the independent model only")


def _usable_part(table: AcceptanceTable, target: str, max_depth: int | None) -> AcceptanceTable:
    """Cut a table to the ranks and distances an engine can use; its guesses cost no tokens."""
    num_ranks = table.num_ranks
    if target in ("medusa", "eagle"):
        num_ranks = min(num_ranks, choices.MAX_RANK + 1)
    m = table.num_distances if max_depth is None else min(table.num_distances, max_depth)
    if m < 1:
        raise SearchError(f"max depth: must be at least 1, not {max_depth}")
    ranks: dict[Path, int] = {}
    for *row, count in table.ranks or ():
        path = tuple(min(rank, num_ranks) for rank in row[:m])
        ranks[path] = ranks.get(path, 0) + count
    return replace(
        table,
        marginals=tuple(row[:num_ranks] for row in table.marginals[:m]),
        ranks=tuple((*path, count) for path, count in sorted(ranks.items())) or None,
        intervals=None,
        tokens_per_prompt_token=0,
    )


def _result(content: str | bytes, best: Best, clock: Clock, *notes: str) -> TargetResult:
    speedup = None if clock.latency is None else best.tokens / best.seconds * clock.seconds(1, 0)
    said = f"{best.tokens:.4f} tokens per step" + ("" if speedup is None else f", predicted speedup {speedup:.3f}")
    if not best.setting:
        said = "no speculation is fastest here; run the engine without it"
    return TargetResult(content, best.tokens, speedup, (said, *notes))


def _static_tree(target: str, trie: AcceptanceTrie, clock: Clock) -> TargetResult:
    best, tree = best_tree(trie, clock)
    paths = [] if tree is None else [node.path for node in tree.nodes[1:]]
    if target == "sequoia":
        return _result(growmap.growmap_bytes(paths), best, clock)
    if target == "umbrella":
        return _result(growmap.growmap_text(paths), best, clock)
    if not paths:
        return _result("", best, clock)
    text = choices.choices_text if target == "medusa" else choices.eagle_choices_text
    return _result(text(paths, trie.num_distances), best, clock)


def _vllm(table: AcceptanceTable, clock: Clock) -> TargetResult:
    best = best_widths(table, clock)
    if not best.setting:
        return _result("", best, clock)
    paths = vllm.uniform_paths(best.setting)
    note = f"set num_speculative_tokens to {len(paths)} beside it"
    return _result(vllm.token_tree_text(paths, len(paths)), best, clock, note)


def _sglang(table: AcceptanceTable, clock: Clock) -> TargetResult:
    best = best_pool(table, clock, sglang.pool_size)
    return _result(sglang.EagleFlags(*best.setting).text() if best.setting else "", best, clock)


def _tensorrt_llm(table: AcceptanceTable, clock: Clock) -> TargetResult:
    best = best_pool(table, clock, lambda steps, topk: topk * steps)
    if not best.setting:
        return _result("", best, clock)
    steps, topk, size = best.setting
    return _result(tensorrt_llm.DynamicTree(steps, size - 1, topk).text(), best, clock)


def _llama_cpp(trie: AcceptanceTrie, clock: Clock) -> TargetResult:
    best = best_chain(trie, clock)
    if not best.setting:
        return _result(llama_cpp.NO_SPECULATION, best, clock)
    return _result(llama_cpp.DraftFlags(best.setting[0], break_even(best, clock)).text(), best, clock)


def _schedule(
    target: str, trie: AcceptanceTrie, budget: int, latencies: Sequence[LatencyProfile], draft_s: float
) -> TargetResult:
    """Choose a chain for each profiled batch size; it also holds down to the next smaller profile."""
    profiles = sorted(latencies, key=lambda profile: profile.batch_size)
    bests: list[Best] = []
    for profile in profiles:
        most = budget
        if target == "tensorrt-llm-schedule" and bests:
            # max_draft_len is the length at the smallest batch size, and no other may exceed it.
            most = min(budget, 1 + sum(bests[0].setting))
        bests.append(best_chain(trie, Clock(most, profile, draft_s)))
    lengths = [sum(best.setting) for best in bests]
    ends = [profile.batch_size for profile in profiles]
    notes = [f"batch sizes up to {end}: {length} draft tokens" for end, length in zip(ends, lengths, strict=True)]
    speedup = bests[0].tokens / bests[0].seconds * profiles[0].median_s(1)
    if max(lengths) == 0:
        notes.append("no speculation is fastest here; run the engine without it")
        return TargetResult("", 1.0, speedup, tuple(notes))
    # Neighbouring ranges of the same length are joined.
    last = [i for i in range(len(ends)) if i + 1 == len(ends) or lengths[i] != lengths[i + 1]]
    if target == "vllm-schedule":
        starts = [1, *(ends[i] + 1 for i in last[:-1])]
        ranges = [[start, ends[i], lengths[i]] for start, i in zip(starts, last, strict=True)]
        content = vllm.batch_ranges_text(ranges, max(lengths))
        notes.append(f"set num_speculative_tokens to {max(lengths)} beside it")
    else:
        content = tensorrt_llm.schedule_text({ends[i]: lengths[i] for i in last}, lengths[0])
        notes.append(f"set max_draft_len to {lengths[0]} beside it; above batch size {ends[-1]} speculation is off")
    return TargetResult(content, bests[0].tokens, speedup, tuple(notes))
