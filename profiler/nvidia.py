"""NVIDIA cards through NVML: which are visible to this process, what they are, whether they are slowed or shared.

NVML counts all cards of the machine in PCI order; CUDA counts what CUDA_VISIBLE_DEVICES leaves, fastest first. This
module brings the two together without starting CUDA.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from treeopt.errors import DeviceError

__all__ = [
    "GpuActivity",
    "NvidiaDevice",
    "driver_version",
    "gpu_activity",
    "nvml_session",
    "visible_nvidia_devices",
]


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    """One card, or one MIG slice of a card.

    Parameters
    ----------
    uuid : str
        ``GPU-..`` or ``MIG-..``.
    name : str
        Product name; with the profile for a slice, as in ``NVIDIA A100-SXM4-40GB MIG 1g.5gb``.
    memory_bytes : int
        Its memory.
    compute_capability : tuple of int
        Major and minor.
    power_limit_w : float or None
        Enforced limit of the card; None when not supported.
    mig : bool
        A slice.
    """

    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    power_limit_w: float | None
    mig: bool = False

    def hardware(self) -> dict[str, object]:
        """Return the figures that make the hardware class."""
        return {
            "memory_bytes": self.memory_bytes,
            "compute_capability": "{}.{}".format(*self.compute_capability),
            "power_limit_w": self.power_limit_w,
            "mig": self.mig,
        }


@contextmanager
def nvml_session(nvml: Any = None) -> Iterator[Any]:
    """Start NVML, yield its module, and shut it down.

    Raises
    ------
    DeviceError
        When the library or the driver is missing.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise DeviceError(
                "device: reading NVIDIA cards needs the nvidia-ml-py package: pip install 'treeopt[profile]'"
            ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError(
            f"device: no NVIDIA driver answers ({error}); use --device cpu, or start the driver"
        ) from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise DeviceError(
            f"device: the NVIDIA driver failed ({error}); is the card still there? look at nvidia-smi"
        ) from error
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def driver_version(nvml: Any = None) -> str:
    """Return the version of the NVIDIA driver."""
    with nvml_session(nvml) as session:
        return _text(session.nvmlSystemGetDriverVersion())


def visible_nvidia_devices(*, nvml: Any = None, environ: Mapping[str, str] | None = None) -> tuple[NvidiaDevice, ...]:
    """Return the devices that CUDA would number 0, 1, .. in this process.

    CUDA_VISIBLE_DEVICES may hold indices, UUIDs or their beginnings, and MIG UUIDs; as in CUDA, the first entry that
    names nothing ends the list, and a card in MIG mode given by index stands for its first slice.

    Raises
    ------
    DeviceError
        When NVML is missing, or when unlike cards are given by index in CUDA's own order, which only CUDA knows.
    """
    environ = os.environ if environ is None else environ
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    with nvml_session(nvml) as session:
        handles = [session.nvmlDeviceGetHandleByIndex(i) for i in range(session.nvmlDeviceGetCount())]
        cards = [_card(session, handle) for handle in handles]
        slices = [_slices(session, handle, card) for handle, card in zip(handles, cards, strict=True)]
    entries = [str(i) for i in range(len(cards))] if listed is None else [part.strip() for part in listed.split(",")]
    unlike = len({card.name for card in cards}) > 1
    chosen: list[NvidiaDevice] = []
    for entry in entries:
        if entry.isdecimal() and unlike and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise DeviceError(
                "CUDA_VISIBLE_DEVICES: unlike cards are numbered in an order that only CUDA knows; set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the card by its UUID (nvidia-smi -L)"
            )
        found = _named(entry, cards, slices)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return tuple(chosen)


def _named(entry: str, cards: list[NvidiaDevice], slices: list[list[NvidiaDevice]]) -> NvidiaDevice | None:
    """Return the device one entry of CUDA_VISIBLE_DEVICES stands for, or None."""
    if entry.isdecimal():
        place = int(entry)
        if place >= len(cards):
            return None
        return slices[place][0] if slices[place] else cards[place]
    everything = cards + [part for parts in slices for part in parts]
    matches = [device for device in everything if entry.startswith(("GPU-", "MIG-")) and device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _or_none(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return the answer, or None where the card says that it is not supported: unknown, never a figure."""
    try:
        return ask()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
            return None
        raise


def _card(nvml: Any, handle: Any) -> NvidiaDevice:
    limit_mw = _or_none(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvidiaDevice(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=(int(major), int(minor)),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
    )


def _slices(nvml: Any, handle: Any, card: NvidiaDevice) -> list[NvidiaDevice]:
    mode = _or_none(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    if not mode or not mode[0]:
        return []
    found = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                continue  # slots of a card need not all be filled
            raise
        found.append(
            NvidiaDevice(
                uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                name=_text(nvml.nvmlDeviceGetName(part)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(part).total),
                compute_capability=card.compute_capability,
                power_limit_w=card.power_limit_w,
                mig=True,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What a card is doing; None where it cannot be told.

    Parameters
    ----------
    foreign_processes : int or None
        Compute processes besides this one.
    utilisation : float or None
        Share of the time a kernel ran, 0 to 1; not supported under MIG.
    free_bytes : int or None
        Free memory.
    throttled : bool or None
        Clocks are lowered because of heat or a power brake. The ordinary power cap is not counted: it belongs to the
        card's normal speed.
    """

    foreign_processes: int | None
    utilisation: float | None
    free_bytes: int | None
    throttled: bool | None


def gpu_activity(uuid: str, *, nvml: Any = None) -> GpuActivity:
    """Read what the card, or MIG slice, with this UUID is doing.

    Raises
    ------
    DeviceError
        When the card does not answer any more.
    """
    with nvml_session(nvml) as session:
        handle = session.nvmlDeviceGetHandleByUUID(uuid)
        card = session.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if uuid.startswith("MIG-") else handle
        processes = _or_none(session, lambda: session.nvmlDeviceGetComputeRunningProcesses(handle))
        rates = _or_none(session, lambda: session.nvmlDeviceGetUtilizationRates(handle))
        memory = _or_none(session, lambda: session.nvmlDeviceGetMemoryInfo(handle))
        reasons = _or_none(session, lambda: session.nvmlDeviceGetCurrentClocksEventReasons(card))
    slow = (
        session.nvmlClocksEventReasonHwSlowdown
        | session.nvmlClocksEventReasonHwThermalSlowdown
        | session.nvmlClocksEventReasonSwThermalSlowdown
        | session.nvmlClocksEventReasonHwPowerBrakeSlowdown
    )
    return GpuActivity(
        foreign_processes=None if processes is None else sum(process.pid != os.getpid() for process in processes),
        utilisation=None if rates is None else rates.gpu / 100,
        free_bytes=None if memory is None else int(memory.free),
        throttled=None if reasons is None else bool(reasons & slow),
    )
