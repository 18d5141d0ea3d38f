"""Use case: search a switching table over batch sizes and context lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from treeopt.acceptance import acceptance_trie
from treeopt.app.latency_lookup import find_profile, stored_profile
from treeopt.artifact import digest, read_document
from treeopt.bundled import load_acceptance
from treeopt.errors import ProfileError
from treeopt.search import search
from treeopt.switching import SwitchPlan, plan_switch
from treeopt.types import AcceptanceTable, LatencyProfile

__all__ = ["SwitchSearch", "search_switch"]

SAME = ("model", "dtype", "attention", "graph_mode", "cache", "kernels")
"""What profiles of one switching table must have in common, besides the device."""


@dataclass(frozen=True, slots=True)
class SwitchSearch:
    """A switching table, and what it was searched with.

    Parameters
    ----------
    plan : SwitchPlan
        The table and its value at every measured pair.
    table : AcceptanceTable
        How often the guesses are right.
    profiles : tuple of LatencyProfile
        One per pair, sorted by batch size, then context length.
    """

    plan: SwitchPlan
    table: AcceptanceTable
    profiles: tuple[LatencyProfile, ...]


def search_switch(
    acceptance: str,
    latency: Sequence[str],
    budget: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    method: str = "exact",
    acceptance_model: str = "independent",
    db_url: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> SwitchSearch:
    """Search the best design of every pair, and a small set of designs for all of them.

    Parameters
    ----------
    acceptance : str
        Bundled name or file.
    latency : sequence of str
        ``auto`` for this device's stored profiles, or files and digests of stored profiles, one per pair.
    budget : int
        Cap on the tokens of every pass.
    batches, contexts : sequence of int
        Batch sizes and context lengths; every pair must have been measured.
    method, acceptance_model : str
        As `treeopt.search`.
    db_url : str, optional
        Database of the stored profiles.
    progress : callable, optional
        Called once per pair.

    Raises
    ------
    TreeOptError
        When a file cannot be read, a pair was not measured, or profiles are of different machines or models.
    """
    table, table_digest = load_acceptance(acceptance)
    profiles = _profiles(table, latency, batches, contexts, db_url)
    optima = {}
    for (batch, context), profile in profiles.items():
        design = search(table, budget, profile, method=method, acceptance_model=acceptance_model)
        optima[batch, context] = replace(design, acceptance_digest=table_digest, latency_digest=digest(profile))
        if progress is not None:
            progress(f"batch {batch}, context {context}")
    plan = plan_switch(acceptance_trie(table, acceptance_model), optima, profiles)
    return SwitchSearch(plan, table, tuple(profiles.values()))


def _profiles(
    table: AcceptanceTable, latency: Sequence[str], batches: Sequence[int], contexts: Sequence[int], db_url: str | None
) -> dict[tuple[int, int], LatencyProfile]:
    """Return the profile of every pair."""
    given = {}
    for name in latency:
        if name in ("auto", "none"):
            continue
        profile = read_document(name, LatencyProfile) if Path(name).exists() else stored_profile(name, db_url)
        given[profile.batch_size, profile.context_len] = profile
    profiles: dict[tuple[int, int], LatencyProfile] = {}
    for batch in sorted(set(batches)):
        for context in sorted(set(contexts)):
            found = given.get((batch, context))
            if found is None and "auto" in latency:
                found, _ = find_profile(table.model, context, batch, db_url)
            if found is None or (found.batch_size, found.context_len) != (batch, context):
                raise ProfileError(
                    f"no latency profile of batch {batch}, context {context}; run: treeopt profile run --model "
                    f"{table.model} --contexts {_listed(contexts)} --batch-sizes {_listed(batches)}, or give files "
                    "with --latency"
                )
            profiles[batch, context] = found
    _refuse_mixed(list(profiles.values()))
    return profiles


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in sorted(set(numbers)))


def _refuse_mixed(profiles: Sequence[LatencyProfile]) -> None:
    """Curves of different machines or settings cannot be switched between."""
    first = profiles[0]
    for profile in profiles[1:]:
        for name in SAME:
            ours, theirs = getattr(profile, name), getattr(first, name)
            if ours != theirs:
                raise ProfileError(
                    f"latency: the profile of batch {profile.batch_size}, context {profile.context_len} has {name} "
                    f"{ours!r}, the first one {theirs!r}; measure all pairs alike"
                )
        if _identity(profile) != _identity(first):
            raise ProfileError(
                f"latency: the profile of batch {profile.batch_size}, context {profile.context_len} is of another "
                f"device than the first one ({profile.device['name']}, {first.device['name']}); measure all on one"
            )


def _identity(profile: LatencyProfile) -> object:
    return profile.device.get("instance_digest") or dict(profile.device)
