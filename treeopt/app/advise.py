"""Use case: say whether a model on a machine should use a tree, a chain or nothing, and how sure that is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treeopt.acceptance import acceptance_trie
from treeopt.advice import BreakEven, Contender, Verdict, break_even, contenders, judge
from treeopt.app.latency_lookup import stored_profile
from treeopt.app.search import bundled_ranks, load_inputs
from treeopt.artifact import read_document
from treeopt.errors import ProfileError
from treeopt.marginal import Marginal, marginal_values
from treeopt.types import AcceptanceTable, LatencyProfile, RankRecord

__all__ = ["Advice", "advice_document", "advise", "load_advice_inputs", "samples_needed", "stored_profiles_like"]

MOST_SHOWN = 8
"""Contenders that are listed for being fast."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything the advice says, and what it was given on.

    Parameters
    ----------
    table : AcceptanceTable
        How often the guesses are right.
    latency : LatencyProfile
        The profile that the verdict is for.
    budget : int
        Cap on the tokens of a pass.
    verdict : Verdict
        What to use, and the contenders.
    break_even : tuple of BreakEven
        Per batch size and context length that was measured.
    marginal : Marginal
        Wider or deeper, of the best design that speculates.
    """

    table: AcceptanceTable
    latency: LatencyProfile
    budget: int
    verdict: Verdict
    break_even: tuple[BreakEven, ...]
    marginal: Marginal

    @property
    def rival(self) -> Contender | None:
        """The contender to weigh the advice against: plain decoding, or the best speculation when that is advised."""
        kinds = {"none"} if self.verdict.best.kind != "none" else {"chain", "tree"}
        return next((each for each in self.verdict.contenders if each.kind in kinds), None)

    @property
    def shown(self) -> tuple[Contender, ...]:
        """The contenders worth a line: the fastest, whatever is tied with them, the best chain, plain decoding."""
        ranked = self.verdict.contenders
        kept = {id(each) for each in (*ranked[:MOST_SHOWN], *self.tied)}
        for kind in ("chain", "none"):
            kept.update(id(each) for each in [each for each in ranked if each.kind == kind][:1])
        return tuple(each for each in ranked if id(each) in kept)

    @property
    def tied(self) -> tuple[Contender, ...]:
        """Contenders that the data cannot tell from the best one, itself left out."""
        return tuple(each for each in self.verdict.contenders[1:] if each.tied)


def load_advice_inputs(
    acceptance: str, latency: Sequence[str], replay: str | None, db_url: str | None = None
) -> tuple[AcceptanceTable, list[LatencyProfile], RankRecord | None, str | None]:
    """Load what advice is given on.

    Parameters
    ----------
    acceptance : str
        Bundled name or file.
    latency : sequence of str
        ``auto`` for this device's stored profiles, or files and digests; the first is the one that the verdict is for.
    replay : str, optional
        File of recorded ranks; without it the table's own, when bundled.
    db_url : str, optional
        Database of the stored profiles.

    Returns
    -------
    table : AcceptanceTable
    profiles : list of LatencyProfile
        The verdict's first, then those of other batch sizes and contexts.
    record : RankRecord or None
    line : str or None
        To tell people which profile was taken.

    Raises
    ------
    TreeOptError
        When a file cannot be read or there is no profile: without latencies there is nothing to advise.
    """
    inputs, line = load_inputs(acceptance, latency[0], db_url=db_url)
    if inputs.latency is None:
        raise ProfileError(f"advice needs latencies; {line or 'none were given'}, or give a file with --latency")
    others = [
        read_document(name, LatencyProfile) if Path(name).exists() else stored_profile(name, db_url)
        for name in latency[1:]
    ]
    if latency[0] == "auto":
        others += stored_profiles_like(inputs.latency, db_url)
    record = bundled_ranks(acceptance) if replay is None else read_document(replay, RankRecord)
    return inputs.table, [inputs.latency, *others], record, line


def stored_profiles_like(profile: LatencyProfile, db_url: str | None = None) -> list[LatencyProfile]:
    """Return the stored profiles that differ from one only in batch size or context length, the newest of each."""
    from treeopt.app.profile_library import open_for_reading, stored

    engine = open_for_reading(db_url)
    found: dict[tuple[int, int], LatencyProfile] = {}
    same = ("dtype", "attention", "graph_mode", "cache", "kernels")
    for each in stored(engine, model=profile.model):
        if not each.complete or each.flags:
            continue
        known = each.conditions
        if known.device.get("instance_digest") != profile.device.get("instance_digest"):
            continue
        if any(getattr(known, name) != getattr(profile, name) for name in same):
            continue
        found.setdefault((known.batch_size, known.context_len), each.to_profile())
    found.pop((profile.batch_size, profile.context_len), None)
    if engine is not None:
        engine.dispose()
    return list(found.values())


def advise(
    table: AcceptanceTable,
    profiles: Sequence[LatencyProfile],
    budget: int,
    record: RankRecord | None = None,
    *,
    acceptance_model: str = "independent",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Weigh every way to decode under a budget on the machine of the first profile.

    Parameters
    ----------
    table : AcceptanceTable
        How often the guesses are right.
    profiles : sequence of LatencyProfile
        The first is the one that the verdict is for; break-even is computed for all.
    budget : int
        Cap on the tokens of a pass.
    record : RankRecord, optional
        Replayed in place of the acceptance model.
    acceptance_model : {"independent", "joint"}
        What designs are searched under.
    seed : int
        Of the bootstrap.
    progress : callable, optional
        Called with one line per design.

    Raises
    ------
    TreeOptError
        When the inputs do not belong together.
    """
    trie = acceptance_trie(table, acceptance_model)
    latency = profiles[0]
    if not any(1 < point.num_tokens <= budget for point in latency.points):
        raise ProfileError(
            f"latency: no size from 2 to {budget} tokens was measured, so there is nothing to weigh plain decoding "
            "against; profile such sizes or raise --budget"
        )
    designs = contenders(trie, budget, latency, progress)
    verdict = judge(designs, trie, table, latency, record, seed=seed)
    speculating = next((each for each in verdict.contenders if each.kind != "none"), verdict.best)
    return Advice(
        table=table,
        latency=latency,
        budget=budget,
        verdict=verdict,
        break_even=break_even(trie, budget, profiles),
        marginal=marginal_values(speculating.design, table, budget, latency),
    )


def advice_document(advice: Advice) -> dict[str, Any]:
    """Return the advice as a JSON object."""
    verdict, latency = advice.verdict, advice.latency
    best = verdict.best
    return {
        "use": verdict.use,
        "model": advice.table.model,
        "device": latency.device["name"],
        "dtype": latency.dtype,
        "batch_size": latency.batch_size,
        "context_len": latency.context_len,
        "budget": advice.budget,
        "basis": verdict.basis,
        "speedup": best.speedup,
        "low": best.low,
        "high": best.high,
        "acceptance_length": best.acceptance_length,
        "resampled": verdict.unit,
        "num_samples": verdict.num_samples,
        "num_timed_steps": verdict.num_steps,
        "designs": [_contender_document(each, verdict) for each in verdict.contenders],
        "break_even": [asdict(row) for row in advice.break_even],
        "wider_or_deeper": asdict(advice.marginal),
    }


def _contender_document(contender: Contender, verdict: Verdict) -> dict[str, Any]:
    needed = samples_needed(contender, verdict)
    return {
        "name": contender.name,
        "kind": contender.kind,
        "pass_tokens": list(contender.design.pass_tokens),
        "sizes": list(contender.design.sizes()),
        "acceptance_length": contender.acceptance_length,
        "speedup": contender.speedup,
        "low": contender.low,
        "high": contender.high,
        "tied_with_best": contender.tied,
        "samples_to_separate": None if needed is None else needed[0],
        "timed_steps_to_separate": None if needed is None else needed[1],
    }


def samples_needed(contender: Contender, verdict: Verdict) -> tuple[int, int] | None:
    """Return how many acceptance samples and timed steps per size would tell a contender from the best one.

    Both kinds are taken to grow alike. None when unknown, or when no number would.
    """
    if contender.times_samples is None or verdict.num_samples is None or verdict.num_steps is None:
        return None
    times = contender.times_samples
    return math.ceil(times * verdict.num_samples), math.ceil(times * verdict.num_steps)
