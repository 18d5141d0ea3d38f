"""Watch what else runs on the machine while steps are timed, and before they are.

`Probe` answers two questions from the same readings: the conditions of the last interval (for the flags of a
measurement) and an observation (for the decision whether the machine is idle).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.device import DeviceIdentity
from profiler.flags import Conditions
from profiler.idle import Observation
from profiler.nvidia import GpuActivity, gpu_activity

__all__ = ["CpuTimes", "Probe", "foreign_share", "read_cpu_times"]

LEAST_INTERVAL_S = 0.25
"""Processor times come in ticks of 10 ms: shares of shorter intervals mean nothing."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor time since boot, seconds over all processors, at one moment."""

    wall_s: float
    busy_s: float
    own_s: float
    processors: int


def foreign_share(before: CpuTimes, after: CpuTimes) -> float:
    """Return the share of all processors that others used between two readings, 0 to 1.

    Examples
    --------
    >>> foreign_share(CpuTimes(0.0, 0.0, 0.0, 2), CpuTimes(1.0, 1.5, 1.0, 2))
    0.25
    """
    capacity_s = (after.wall_s - before.wall_s) * after.processors
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, foreign_s / capacity_s)) if capacity_s > 0 else 0.0


def read_cpu_times() -> CpuTimes:
    """Read the processor times: all that is not idle is busy, what a hypervisor steals included."""
    import psutil  # type: ignore[import-untyped]

    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user time already
    own = os.times()
    return CpuTimes(
        wall_s=time.monotonic(),
        busy_s=sum(times) - idle_s - guest_s,
        own_s=own.user + own.system + own.children_user + own.children_system,
        processors=psutil.cpu_count() or 1,
    )


def _throttle_count() -> int | None:
    """Sum the kernel's counts of thermal slow-downs; None where it keeps none, as in most virtual machines."""
    paths = list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    try:
        return sum(int(path.read_text(encoding="ascii")) for path in paths) if paths else None
    except (OSError, ValueError):
        return None


class Probe:
    """Reads a device's conditions; one per measurement.

    Parameters
    ----------
    device : DeviceIdentity
        What is measured.
    cpu_times, activity, throttle_count : callable, optional
        Stand-ins for the system's own figures.
    """

    def __init__(
        self,
        device: DeviceIdentity,
        *,
        cpu_times: Callable[[], CpuTimes] = read_cpu_times,
        activity: Callable[[DeviceIdentity], GpuActivity | None] | None = None,
        throttle_count: Callable[[], int | None] = _throttle_count,
    ) -> None:
        self._device = device
        self._cpu_times = cpu_times
        self._activity = activity or _activity_of
        self._throttle_count = throttle_count
        self._before = cpu_times()
        self._throttles = throttle_count()
        self._share: float | None = None

    def _foreign_cpu(self) -> float | None:
        now = self._cpu_times()
        if now.wall_s - self._before.wall_s >= LEAST_INTERVAL_S:
            self._share = foreign_share(self._before, now)
            self._before = now
        return self._share

    def conditions(self) -> Conditions:
        """Return what happened since the last call; over at least a quarter of a second for the processors."""
        gpu = self._activity(self._device)
        throttles = self._throttle_count()
        hotter = None if throttles is None or self._throttles is None else throttles > self._throttles
        self._throttles = throttles
        return Conditions(
            foreign_cpu=self._foreign_cpu(),
            foreign_gpu_processes=None if gpu is None else gpu.foreign_processes,
            throttled=hotter if gpu is None else gpu.throttled,
        )

    def observe(self) -> Observation:
        """Return what the machine is doing, for the idle policy."""
        import psutil

        if self._share is None:
            time.sleep(LEAST_INTERVAL_S)
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        gpu = self._activity(self._device)
        return Observation(
            foreign_cpu=self._foreign_cpu(),
            free_bytes=psutil.virtual_memory().available if gpu is None else gpu.free_bytes,
            # psutil knows the battery of a mouse, and adapters by some names only: then power_plugged is None.
            on_mains=True if battery is None else battery.power_plugged,
            foreign_gpu_processes=_if_gpu(self._device, gpu and gpu.foreign_processes, 0),
            gpu_utilisation=_if_gpu(self._device, gpu and gpu.utilisation, 0.0),
        )


def _if_gpu(device: DeviceIdentity, value: Any, otherwise: Any) -> Any:
    """Return the GPU's figure (None when it cannot be told), or what a device without a GPU counts as."""
    return otherwise if device.kind in ("cpu", "mps") else value


def _activity_of(device: DeviceIdentity) -> GpuActivity | None:
    return gpu_activity(str(device.instance["uuid"])) if device.kind == "cuda" else None
