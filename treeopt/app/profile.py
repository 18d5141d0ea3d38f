"""Use case: measure latency profiles of a model on this machine, and keep every point as soon as it is measured.

`treeopt.app.profile_measure` runs one curve; here the model is loaded and the curves of a request are run one after the
other. `treeopt.app.watch` does the same when the machine is idle.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from itertools import product
from typing import Any

from sqlalchemy import Engine

from db.values import Conditions, Lease
from profiler.device import DeviceIdentity, identify
from profiler.environment import environment
from profiler.latency import StoppingRule
from profiler.lock import device_lock
from profiler.probe import Probe
from treeopt.app.profile_measure import Hooks, Outcome, measure_profile
from treeopt.app.profile_request import ProfileRequest
from treeopt.errors import TreeOptError
from treeopt.types import LatencyProfile

__all__ = ["Hooks", "Outcome", "ProfileRequest", "run_profiles", "search_choice"]


def _conditions(
    request: ProfileRequest,
    device: DeviceIdentity,
    loaded: Any,
    *,
    context_len: int,
    batch_size: int,
    cache: str,
    graph_mode: str,
    attention: str,
    versions: Mapping[str, str],
) -> Conditions:
    """Return the conditions of one curve of a request, from what was really loaded."""
    return Conditions(
        device=device.to_document(),
        model=loaded.name,
        fingerprint=loaded.digest,
        dtype=str(loaded.dtype).removeprefix("torch."),
        batch_size=batch_size,
        context_len=context_len,
        attention=attention,
        graph_mode=graph_mode,
        cache=cache,
        kernels=loaded.kernels,
        versions={**versions, **({"weights": "random"} if request.config is not None else {})},
    )


def run_profiles(
    engine: Engine,
    request: ProfileRequest,
    *,
    hooks: Hooks | None = None,
    rule: StoppingRule | None = None,
    lease: Lease | None = None,
    lock_timeout_s: float = 0.0,
    lock: Callable[[str, float], AbstractContextManager[Any]] = device_lock,
    done_after: datetime | None = None,
) -> Iterator[Outcome]:
    """Load the model and measure every curve of a request, holding the device.

    Yields
    ------
    Outcome
        One per curve; the first that gave way is the last.

    Raises
    ------
    TreeOptError
        When the device is taken, the model cannot be loaded, or the device fails.
    """
    device = identify(request.device)
    probe = Probe(device)
    with lock(device.lock_key, lock_timeout_s):
        from ppd_runtime.hf import attention_backend
        from treeopt.app.profile_steps import StepBench, load

        versions = environment(device.kind)
        for dtype, attention in product(request.dtypes, request.attentions):
            loaded = load(
                request.model,
                config=request.config,
                dtype=dtype,
                device=device.torch_name,
                attention=attention,
                kernels=request.kernels,
            )
            for graph_mode, cache in product(request.graph_modes, request.caches):
                bench = StepBench(loaded, cache=cache, graph_mode=graph_mode, max_tokens=request.largest)
                wired = replace(hooks or Hooks(), synchronise=bench.synchronise, conditions=probe.conditions)
                for batch_size, context_len in product(request.batch_sizes, request.contexts):
                    conditions = _conditions(
                        request,
                        device,
                        loaded,
                        context_len=context_len,
                        batch_size=batch_size,
                        cache=cache,
                        graph_mode=graph_mode,
                        attention=attention_backend(loaded.model),
                        versions=versions,
                    )
                    outcome = measure_profile(
                        engine,
                        conditions,
                        request,
                        bench.step,
                        bench.forward if request.forward else None,
                        hooks=wired,
                        rule=rule,
                        lease=lease,
                        seed=context_len + batch_size,
                        done_after=done_after,
                    )
                    yield outcome
                    if outcome.stopped is not None:
                        return


def search_choice(table_name: str) -> Callable[[LatencyProfile], Iterable[int]]:
    """Return what `Hooks.chosen` needs: the pass sizes a search with this acceptance table takes on a curve."""
    from treeopt.bundled import load_acceptance
    from treeopt.search import search

    table, _ = load_acceptance(table_name)

    def chosen(profile: LatencyProfile) -> Iterable[int]:
        try:
            return search(table, profile.points[-1].num_tokens, profile).pass_tokens
        except TreeOptError:
            return ()  # a curve too short for any tree: refine by its bends alone

    return chosen
