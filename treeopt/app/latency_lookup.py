"""Find the latency profile that a search should use, at almost no cost when there is none.

Neither torch nor, unless there is a database to open, SQLAlchemy is loaded here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from treeopt.errors import DatabaseError, DeviceError
from treeopt.types import LatencyProfile

if TYPE_CHECKING:
    from db.values import StoredProfile
    from profiler.device import DeviceIdentity

__all__ = ["DEFAULT_CONTEXT_LEN", "find_profile", "stored_profile"]

DEFAULT_CONTEXT_LEN = 512
"""Context to be near to when nothing says which."""


def find_profile(
    table_model: str, context_len: int | None, batch_size: int = 1, db_url: str | None = None
) -> tuple[LatencyProfile | None, str]:
    """Return the profile that ``--latency auto`` uses, and a line that says which or why none.

    The newest complete, unflagged profile of this device and this model, with the nearest batch size, then the
    nearest context length (by ratio).

    Parameters
    ----------
    table_model : str
        The acceptance table's model.
    context_len : int or None
        Tokens in the cache during decoding; None when unknown.
    batch_size : int
        Rows decoded together.
    db_url : str, optional
        As ``--db``.

    Raises
    ------
    DatabaseError
        When there is a database and it cannot be read.
    """
    command = f"run: treeopt profile run --model {table_model}"
    try:
        from db.location import database_exists, database_url, default_available
    except ImportError:
        return None, "no latency profile: the objective is tokens per step (profiles need treeopt[profile])"
    if not default_available(db_url):
        return None, "no latency profile: the objective is tokens per step (profiles need treeopt[profile])"
    url = database_url(db_url)
    if not database_exists(url):
        return None, f"no latency profile yet: the objective is tokens per step; {command}"

    from profiler.device import identify

    try:
        device = identify()
    except DeviceError as error:
        return None, f"no latency profile: {error}"
    from db.profiles import list_profiles
    from db.schema import open_database

    engine = open_database(url)
    if engine is None:
        return None, f"no latency profile yet: the objective is tokens per step; {command}"
    candidates = list_profiles(engine, model=table_model)
    engine.dispose()
    return _choose(candidates, device, table_model, context_len or DEFAULT_CONTEXT_LEN, batch_size, command)


def stored_profile(reference: str, db_url: str | None = None) -> LatencyProfile:
    """Return the stored profile with this digest, or the beginning of it.

    Raises
    ------
    DatabaseError
        When there is no database to look in, or the profile is not complete.
    TreeOptError
        When no stored profile has that digest, or several begin like it.
    """
    try:
        from treeopt.app.profile_library import found, open_for_reading
    except ImportError as error:
        raise DatabaseError(
            f"--latency {reference}: no such file, and stored profiles need treeopt[profile]; install it or give a file"
        ) from error
    engine = open_for_reading(db_url)
    if engine is None:
        raise DatabaseError(f"--latency {reference}: no such file, and no profile is stored; give auto, none or a file")
    profile = found(engine, reference)
    if not profile.complete:
        raise DatabaseError(f"--latency {reference}: is not complete; run the same treeopt profile run again to go on")
    return profile.to_profile()


def _choose(
    candidates: "Sequence[StoredProfile]",
    device: "DeviceIdentity",
    table_model: str,
    context_len: int,
    batch_size: int,
    command: str,
) -> tuple[LatencyProfile | None, str]:
    here = [p for p in candidates if p.conditions.device.get("instance_digest") == device.instance_digest]
    usable = [p for p in here if p.complete and not p.flags]
    if not usable:
        return None, f"{_why_none(candidates, here, device, table_model)}; {command}"
    # Candidates come newest first, and min keeps the first of equals: nearest batch, nearest context, then newest.
    best = min(
        usable,
        key=lambda p: (
            abs(math.log(p.conditions.batch_size / batch_size)),
            abs(math.log(max(1, p.conditions.context_len) / max(1, context_len))),
        ),
    )
    known = best.conditions
    line = (
        f"latency profile {str(best.digest)[:12]} of this device: {known.model}, {known.dtype}, batch "
        f"{known.batch_size}, context {known.context_len}, {known.attention}, {known.graph_mode}, {known.cache} cache, "
        f"{len(best.grid)} sizes up to {max(best.grid)}"
    )
    return best.to_profile(), line + _outdated(best, device)


def _why_none(
    candidates: "Sequence[StoredProfile]", here: "Sequence[StoredProfile]", device: "DeviceIdentity", table_model: str
) -> str:
    """Say what there is instead of a usable profile."""
    start = "no latency profile, so the objective is tokens per step: "
    flagged = next((p for p in here if p.complete), None)
    if flagged is not None:
        name = str(flagged.digest)[:12]
        return f"{start}{name} is flagged {', '.join(flagged.flags)} (use it with --latency {name})"
    if here:
        return f"{start}the one of {table_model} on this device is not complete yet"
    equal = next(
        (p for p in candidates if p.complete and p.conditions.device.get("class_digest") == device.class_digest), None
    )
    if equal is not None:
        name = str(equal.digest)[:12]
        return f"{start}{name} is of another {device.name}, equal to this one (use it with --latency {name})"
    for profile in candidates:
        other = profile.conditions.device
        threads = _threads(other)
        mine = device.hardware.get("threads")
        if profile.complete and other.get("name") == device.name and threads not in (None, mine):
            name = str(profile.digest)[:12]
            return f"{start}{name} is for {threads} threads, this process uses {mine} (OMP_NUM_THREADS)"
    return f"{start}none of {table_model} on this device"


def _threads(identity: Mapping[str, object]) -> object:
    """Return the threads of a processor's identity; None for other devices."""
    hardware = identity.get("hardware")
    return hardware.get("threads") if isinstance(hardware, dict) else None


def _outdated(profile: "StoredProfile", device: "DeviceIdentity") -> str:
    """Say which library has changed since, if any."""
    from profiler.environment import environment

    now = environment(device.kind)
    then = profile.conditions.versions
    changed = [
        f"{name} was {then[name]}, is {now[name]}"
        for name in ("driver", "torch", "transformers")
        if name in then and name in now and then[name] != now[name]
    ]
    return f" (measured before a change: {', '.join(changed)}; measure again)" if changed else ""
