"""When is a machine idle enough to be measured? A pure function of what was observed.

Idle is a conjunction that has to hold for a dwell time: no other compute process on the GPU, its utilisation under a
few per cent, enough free memory, little use of the processors by others, mains power, and the allowed hours. What a
device cannot tell (utilisation under MIG) is unknown, and unknown is not idle unless the policy says so.
"""

import re
from dataclasses import dataclass, replace
from datetime import datetime, time

from treeopt.errors import ProfileError

__all__ = ["Dwell", "Hours", "IdlePolicy", "Observation", "blockers"]

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Hours:
    """Allowed hours of the day, local time; they may span midnight.

    Examples
    --------
    >>> night = Hours.parse("22:00-06:30")
    >>> night.holds(datetime(2026, 1, 1, 23, 0)), night.holds(datetime(2026, 1, 1, 6, 30))
    (True, False)
    """

    start: time
    end: time

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Read ``HH:MM-HH:MM``.

        Raises
        ------
        ProfileError
            When the text is anything else, or the window is empty.
        """
        found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text.strip())
        if not found:
            raise ProfileError(f"--window: {text!r} is not HH:MM-HH:MM, for example 22:00-06:30")
        numbers = [int(part) for part in found.groups()]
        window = cls(time(numbers[0], numbers[1]), time(numbers[2], numbers[3]))
        if window.start == window.end:
            raise ProfileError(f"--window: {text!r} is empty; leave it out to allow every hour")
        return window

    def holds(self, now: datetime) -> bool:
        """Tell whether this local time lies inside, the start included, the end not."""
        if self.start < self.end:
            return self.start <= now.time() < self.end
        return now.time() >= self.start or now.time() < self.end


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """How idle a machine must be.

    Parameters
    ----------
    max_foreign_cpu, max_gpu_utilisation : float
        Largest share used by others, 0 to 1.
    min_free_bytes : int
        Least free memory of the device.
    need_mains : bool
        Not on battery.
    allow_unknown : bool
        Take a figure the device cannot tell as idle.
    hours : Hours or None
        Allowed hours.
    dwell_s : float
        How long all of it must have held.
    """

    max_foreign_cpu: float = 0.25
    max_gpu_utilisation: float = 0.05
    min_free_bytes: int = 512 * MIB
    need_mains: bool = True
    allow_unknown: bool = False
    hours: Hours | None = None
    dwell_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What a machine was doing; None means that it cannot be told.

    The GPU's figures are left at their defaults (0 processes, 0.0) for a device that is no GPU.
    """

    foreign_cpu: float | None
    free_bytes: int | None
    on_mains: bool | None
    foreign_gpu_processes: int | None = 0
    gpu_utilisation: float | None = 0.0


def blockers(seen: Observation, policy: IdlePolicy, now: datetime) -> tuple[str, ...]:
    """Return why the machine is not idle; empty when it is.

    Parameters
    ----------
    seen : Observation
        What the machine is doing.
    policy : IdlePolicy
        Limits.
    now : datetime
        Local time.

    Examples
    --------
    >>> seen = Observation(foreign_cpu=0.9, free_bytes=2**33, on_mains=True)
    >>> blockers(seen, IdlePolicy(), datetime(2026, 1, 1))
    ('other processes use 90 % of the processors',)
    """
    reasons = []
    if policy.hours is not None and not policy.hours.holds(now):
        reasons.append(f"outside the hours {policy.hours.start:%H:%M}-{policy.hours.end:%H:%M}")
    looked = (
        ("the use of the processors by others", seen.foreign_cpu),
        ("whether other processes compute on the GPU", seen.foreign_gpu_processes),
        ("the GPU's utilisation", seen.gpu_utilisation),
        ("the free memory", seen.free_bytes),
        ("the power source", seen.on_mains),
    )
    if not policy.allow_unknown:
        reasons += [f"{what} is unknown (accept it with --allow-unknown)" for what, value in looked if value is None]
    if seen.foreign_cpu is not None and seen.foreign_cpu > policy.max_foreign_cpu:
        reasons.append(f"other processes use {100 * seen.foreign_cpu:.0f} % of the processors")
    if seen.foreign_gpu_processes:
        reasons.append(f"{seen.foreign_gpu_processes} other process(es) compute on the GPU")
    if seen.gpu_utilisation is not None and seen.gpu_utilisation > policy.max_gpu_utilisation:
        reasons.append(f"the GPU is {100 * seen.gpu_utilisation:.0f} % busy")
    if seen.free_bytes is not None and seen.free_bytes < policy.min_free_bytes:
        reasons.append(f"only {seen.free_bytes // MIB} MiB of memory are free")
    if seen.on_mains is False and policy.need_mains:
        reasons.append("on battery")
    return tuple(reasons)


@dataclass(frozen=True, slots=True)
class Dwell:
    """Since when the machine has been idle without a break, monotonic seconds; None while it is busy.

    Examples
    --------
    >>> policy = IdlePolicy(dwell_s=60)
    >>> Dwell().after(True, 0.0).after(True, 59.0).idle(59.0, policy)
    False
    >>> Dwell().after(True, 0.0).after(False, 30.0).after(True, 40.0).idle(99.0, policy)
    False
    """

    since_s: float | None = None

    def after(self, quiet: bool, now_s: float) -> "Dwell":
        """Return the state after one more look."""
        if not quiet:
            return replace(self, since_s=None)
        return self if self.since_s is not None else replace(self, since_s=now_s)

    def idle(self, now_s: float, policy: IdlePolicy) -> bool:
        """Tell whether it has been quiet for the dwell time."""
        return self.since_s is not None and now_s - self.since_s >= policy.dwell_s
