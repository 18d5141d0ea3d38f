"""The latency curve that a benchmark predicts with: the stored one of this very setup, or one measured on the spot.

A curve promises something only for the sizes, the context and the setup that it was measured with, so ``auto`` takes a
stored curve when all of them fit, and else measures the few sizes that are needed, at the context of the prompts at
hand, with the model that is loaded already, and stores that.
"""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from db.profiles import list_profiles
from db.values import Conditions, StoredProfile
from ppd_runtime.hf import attention_backend
from ppd_runtime.models import LoadedModel
from profiler.device import DeviceIdentity, identify
from profiler.environment import environment
from profiler.flags import NOISY
from profiler.latency import StoppingRule
from profiler.lock import device_lock
from profiler.probe import Probe
from profiler.refine import coarse_tokens
from treeopt.app.latency_lookup import stored_profile
from treeopt.app.profile_library import open_for_writing
from treeopt.app.profile_measure import Hooks, measure_profile
from treeopt.app.profile_request import ProfileRequest
from treeopt.app.profile_steps import StepBench
from treeopt.artifact import read_document
from treeopt.types import LatencyProfile

__all__ = ["bench_latency", "needed_tokens"]

CONTEXT_FACTOR = 1.6
"""Contexts this close, as a ratio, count as the same: attention is a small part of a step at this distance."""

RULE = StoppingRule(halfwidth=0.02, max_s=2.0)

HARMLESS_FLAGS = frozenset({NOISY})
"""Flags with which a stored curve is taken again: a median stands scatter, but not another program."""

Progress = Callable[[str], None]


def needed_tokens(budgets: Sequence[int], graph_mode: str = "eager") -> tuple[int, ...]:
    """Return the sizes to measure: plain decoding, every budget, and the usual sizes in between.

    Compiling a size takes a minute or two, so of compiled passes only the first two are measured.

    Examples
    --------
    >>> needed_tokens([4, 10])
    (1, 2, 4, 8, 10)
    >>> needed_tokens([4, 10], "compiled")
    (1, 4, 10)
    """
    if graph_mode == "compiled":
        return tuple(sorted({1, *budgets}))
    most = max(budgets)
    return tuple(sorted({1, *budgets, *(n for n in coarse_tokens(most) if n <= most)}))


def bench_latency(
    loaded: LoadedModel,
    reference: str,
    budgets: Sequence[int],
    context_len: int,
    *,
    cache: str = "dynamic",
    graph_mode: str = "eager",
    db_url: str | None = None,
    keep_flagged_s: float = 0.0,
    progress: Progress | None = None,
) -> tuple[LatencyProfile | None, str]:
    """Return the curve to predict with, and a line that says which it is.

    Parameters
    ----------
    loaded : LoadedModel
        The model, as it will decode.
    reference : str
        ``auto``; ``fresh`` to measure in any case; ``none``; a file; or the digest of a stored profile.
    budgets : sequence of int
        Sizes that must be there with ``auto``.
    context_len : int
        Mean tokens in the cache while decoding.
    cache, graph_mode : str
        How passes run.
    db_url : str, optional
        As ``--db``.
    keep_flagged_s : float
        Age, seconds, up to which ``auto`` also takes a stored curve whose measurement was disturbed.
    progress : callable, optional
        Gets a line per measured size.

    Raises
    ------
    TreeOptError
        When the file, the profile or the database cannot be read, or the device cannot be measured.
    """
    if reference == "none":
        return None, "no latency curve: speedups are measured, not predicted"
    if reference not in ("auto", "fresh"):
        profile = (
            read_document(reference, LatencyProfile) if Path(reference).exists() else stored_profile(reference, db_url)
        )
        return profile, f"latency curve {reference}{_differences(profile, loaded, context_len, cache, graph_mode)}"
    engine = open_for_writing(db_url)
    device = identify(str(loaded.device))
    conditions = _conditions(loaded, device, context_len, cache, graph_mode)
    tokens = needed_tokens(budgets, graph_mode)
    stored = None if reference == "fresh" else _fitting(engine, conditions, tokens, keep_flagged_s)
    if stored is not None:
        line = f"latency curve {str(stored.digest)[:12]}, measured before on this device"
        return stored.to_profile(), line + _warning(stored.flags)
    profile = _measure(engine, conditions, device, loaded, tokens, progress or (lambda text: None))
    line = f"latency curve of {len(tokens)} sizes measured now, context {context_len}"
    return profile, line + _warning(profile.flags)


def _conditions(
    loaded: LoadedModel, device: DeviceIdentity, context_len: int, cache: str, graph_mode: str
) -> Conditions:
    return Conditions(
        device=device.to_document(),
        model=loaded.name,
        fingerprint=loaded.digest,
        dtype=str(loaded.dtype).removeprefix("torch."),
        batch_size=1,
        context_len=context_len,
        attention=attention_backend(loaded.model),
        graph_mode=graph_mode,
        cache=cache,
        kernels=loaded.kernels,
        versions=environment(device.kind),
    )


def _warning(flags: Sequence[str] | None) -> str:
    """Say what was odd about a curve, if it makes predictions doubtful."""
    odd = sorted(set(flags or ()) - HARMLESS_FLAGS)
    return f" (it is flagged {', '.join(odd)}: predictions are doubtful)" if odd else ""


def _fitting(engine: Engine, wanted: Conditions, tokens: Sequence[int], keep_flagged_s: float) -> StoredProfile | None:
    """Return the nearest stored curve of the same setup that has every size; the newest among equals."""
    flagged_from = datetime.now(UTC) - timedelta(seconds=keep_flagged_s)
    instance = str(wanted.device["instance_digest"])
    found = [
        stored
        for stored in list_profiles(engine, model=wanted.model, instance_digest=instance)
        if stored.complete and _same_setup(stored.conditions, wanted) and set(tokens) <= _settled(stored)
        if set(stored.flags) <= HARMLESS_FLAGS or stored.updated_at > flagged_from
    ]
    near = [stored for stored in found if _distance(stored, wanted) <= math.log(CONTEXT_FACTOR)]
    return min(near, key=lambda stored: _distance(stored, wanted), default=None)


def _same_setup(one: Conditions, two: Conditions) -> bool:
    names = ("fingerprint", "dtype", "batch_size", "attention", "graph_mode", "cache", "kernels")
    same_libraries = all(one.versions.get(name) == two.versions.get(name) for name in ("torch", "transformers"))
    return same_libraries and all(getattr(one, name) == getattr(two, name) for name in names)


def _settled(stored: StoredProfile) -> set[int]:
    return {n for n, point in stored.steps.items() if point.settled}


def _distance(stored: StoredProfile, wanted: Conditions) -> float:
    return abs(math.log(max(1, stored.conditions.context_len) / max(1, wanted.context_len)))


def _measure(
    engine: Engine,
    conditions: Conditions,
    device: DeviceIdentity,
    loaded: LoadedModel,
    tokens: tuple[int, ...],
    progress: Progress,
) -> LatencyProfile:
    bench = StepBench(loaded, cache=str(conditions.cache), graph_mode=conditions.graph_mode, max_tokens=max(tokens))
    request = ProfileRequest(loaded.name, tokens=tokens, contexts=(conditions.context_len,), fresh=True)
    done: set[int] = set()

    def told(profile_id: int, visit: object) -> None:
        settled, num_tokens = getattr(visit, "settled", False), getattr(visit, "num_tokens", 0)
        if settled and num_tokens not in done:
            done.add(num_tokens)
            progress(f"latency of {num_tokens} tokens ({len(done)} of {len(tokens)} sizes)")

    probe = Probe(device)
    hooks = Hooks(
        synchronise=bench.synchronise,
        conditions=probe.conditions,
        on_point=told,
        now=lambda: datetime.now(UTC),
    )
    with device_lock(device.lock_key, 0.0):
        outcome = measure_profile(engine, conditions, request, bench.step, hooks=hooks, rule=RULE)
    return outcome.profile.to_profile()


def _differences(profile: LatencyProfile, loaded: LoadedModel, context_len: int, cache: str, graph_mode: str) -> str:
    """Say in what a given curve differs from what will run."""
    pairs = {
        "device": (_named(profile.device.get("name")), identify(str(loaded.device)).name),
        "attention": (profile.attention, attention_backend(loaded.model)),
        "model": (profile.model, loaded.name),
        "dtype": (profile.dtype, str(loaded.dtype).removeprefix("torch.")),
        "batch": (profile.batch_size, 1),
        "kernels": (profile.kernels, loaded.kernels),
        "cache": (profile.cache, cache),
        "graph mode": (profile.graph_mode, graph_mode),
    }
    different = [
        f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in pairs.items() if theirs not in (None, ours)
    ]
    if abs(math.log(max(1, profile.context_len) / max(1, context_len))) > math.log(CONTEXT_FACTOR):
        different.append(f"context {profile.context_len} there, {context_len} here")
    return f" (differs: {'; '.join(different)})" if different else ""


def _named(name: object) -> object:
    """Return a device's name; None where nobody gave one."""
    return None if name == "unnamed" else name
