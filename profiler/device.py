"""Device identity: which curve belongs to which hardware.

Three parts, kept apart:

============  ================================================================================
hardware      the *class*: everything that makes two devices equally fast (digest: `class_digest`)
instance      the one device: UUID of a card, machine of a processor (digest: `instance_digest`)
environment   driver and libraries, see `profiler.environment`; they change on the same device
============  ================================================================================

Two equal cards are two instances of one class. The same product with another memory size, MIG slice or power limit is
another class. Nothing here imports torch: the look-up of a profile must be quick, and must name the same device as the
measurement did. NVIDIA cards are read through NVML, AMD cards through sysfs, processors through ``/proc``.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.environment import torch_build
from profiler.nvidia import NvidiaDevice, visible_nvidia_devices
from treeopt.errors import DeviceError

__all__ = ["KINDS", "DeviceIdentity", "default_threads", "identify"]

KINDS = ("cpu", "cuda", "rocm", "mps")

ISA_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""Instruction sets that choose other matrix kernels."""


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """One device.

    Parameters
    ----------
    kind : {"cpu", "cuda", "rocm", "mps"}
        Family.
    name : str
        Product name.
    index : int
        Place among the visible devices of its kind, as torch counts them.
    hardware : mapping
        Class: every figure that two equally fast devices share.
    instance : mapping
        What tells this device from its equals; never exported, only its digest is.
    """

    kind: str
    name: str
    index: int
    hardware: Mapping[str, object]
    instance: Mapping[str, object]

    @property
    def class_digest(self) -> str:
        """SHA-256 of kind, name and hardware."""
        return _digest({"kind": self.kind, "name": self.name, "hardware": dict(self.hardware)})

    @property
    def instance_digest(self) -> str:
        """SHA-256 of the class and the instance: the key of the device."""
        return _digest({"class": self.class_digest, "instance": dict(self.instance)})

    @property
    def lock_key(self) -> str:
        """SHA-256 of the physical device alone: whatever threads or limits are set, only one measurement at a time."""
        return _digest({"kind": self.kind, "instance": dict(self.instance)})

    @property
    def torch_name(self) -> str:
        """Name of the device in torch, for example ``cuda:0``."""
        return {"cpu": "cpu", "mps": "mps"}.get(self.kind, f"cuda:{self.index}")

    def to_document(self) -> dict[str, object]:
        """Return the ``device`` object of a latency document: no host name, no UUID."""
        return {
            "name": self.name,
            "kind": self.kind,
            "hardware": dict(self.hardware),
            "class_digest": self.class_digest,
            "instance_digest": self.instance_digest,
        }


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identify(
    device: str = "auto",
    *,
    nvml: Any = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> DeviceIdentity:
    """Return the identity of a device, without torch.

    Parameters
    ----------
    device : str
        ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N`` (AMD cards too, as in torch). ``auto`` takes what the
        installed torch would use: a CPU build of torch on a machine with a card runs on the processor.
    nvml : module, optional
        Stands in for ``pynvml``.
    root : Path
        Stands in for the file system's root.
    environ : mapping, optional
        Stands in for the environment variables.
    threads : int, optional
        Threads per step on a processor; default as in `default_threads`.

    Raises
    ------
    DeviceError
        When the device does not exist, is hidden, or cannot be named for certain.
    """
    environ = os.environ if environ is None else environ
    kind, _, place = device.partition(":")
    if kind not in ("auto", "cpu", "mps", "cuda") or (place and not place.isdecimal()) or (place and kind != "cuda"):
        raise DeviceError(f"device: {device!r} is not auto, cpu, mps, cuda or cuda:N")
    build = torch_build()
    if kind == "auto":
        kind = _automatic(build, nvml, root, environ)
    if kind == "cpu":
        return _processor(root, environ, threads)
    if kind == "mps":
        return _apple()
    if build.get("hip"):
        return _amd(int(place or 0), root, environ)
    cards = visible_nvidia_devices(nvml=nvml, environ=environ)
    return _nvidia(cards, int(place or 0))


def _automatic(build: Mapping[str, str], nvml: Any, root: Path, environ: Mapping[str, str]) -> str:
    if build.get("hip") and _amd_nodes(root):
        return "cuda"
    if build.get("cuda") or nvml is not None:
        try:
            if visible_nvidia_devices(nvml=nvml, environ=environ):
                return "cuda"
        except DeviceError:
            if not environ.get("CUDA_VISIBLE_DEVICES", "").strip() and not Path(root, "dev/nvidiactl").exists():
                return "cpu"  # a CUDA build of torch on a machine without a card or driver
            raise
    if platform.system() == "Darwin" and platform.machine() == "arm64" and root == Path("/"):
        return "mps"
    return "cpu"


def _nvidia(cards: tuple[NvidiaDevice, ...], index: int) -> DeviceIdentity:
    if index >= len(cards):
        raise DeviceError(
            f"device: cuda:{index} is not there, {len(cards)} NVIDIA device(s) are visible; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
    card = cards[index]
    return DeviceIdentity("cuda", card.name, index, card.hardware(), {"uuid": card.uuid})


def default_threads(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """Return how many threads a step would use here: OMP_NUM_THREADS, else the processors this process may use."""
    environ = os.environ if environ is None else environ
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else _usable_processors(root)


def _usable_processors(root: Path) -> int:
    """Count the processors of the affinity mask, capped by the control group's quota, as in a container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(Path(root, "sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdecimal():
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def _processor(root: Path, environ: Mapping[str, str], threads: int | None) -> DeviceIdentity:
    facts = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", _read(Path(root, "proc/cpuinfo")), re.MULTILINE))
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    name = facts.get("model name") or _apple_fact("machdep.cpu.brand_string") or platform.processor()
    hardware = {
        "architecture": platform.machine(),
        "processors": _usable_processors(root),
        "threads": threads or default_threads(environ, root),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
    }
    for field, key in (("family", "cpu family"), ("model", "model"), ("stepping", "stepping")):
        if key in facts:
            hardware[field] = facts[key]
    return DeviceIdentity("cpu", name or "unknown processor", 0, hardware, _machine(root))


def _machine(root: Path) -> dict[str, object]:
    """Name this machine: its own id and host name (containers from one image share the id)."""
    return {"machine": _read(Path(root, "etc/machine-id")).strip(), "host": platform.node()}


def _amd_nodes(root: Path) -> list[dict[str, str]]:
    """Read the compute nodes of the AMD kernel driver that are cards, in the driver's order, which torch follows."""
    nodes = []
    for folder in sorted(
        Path(root, "sys/class/kfd/kfd/topology/nodes").glob("*"),
        key=lambda path: int(path.name) if path.name.isdecimal() else 0,
    ):
        facts = dict(line.split(None, 1) for line in _read(folder / "properties").splitlines() if " " in line)
        if facts.get("simd_count", "0") != "0":
            nodes.append({**facts, "memory": _largest_bank(folder), "product": _read(folder / "name").strip()})
    return nodes


def _largest_bank(folder: Path) -> str:
    sizes = [
        int(found.group(1))
        for bank in folder.glob("mem_banks/*/properties")
        if (found := re.search(r"^size_in_bytes (\d+)", _read(bank), re.MULTILINE))
    ]
    return str(max(sizes, default=0))


def _amd(index: int, root: Path, environ: Mapping[str, str]) -> DeviceIdentity:
    nodes = _amd_nodes(root)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environ:
            places = [place.strip() for place in environ[variable].split(",")]
            if any(place and not place.isdecimal() for place in places):
                raise DeviceError(
                    f"{variable}: give card numbers, as in 0,1; {environ[variable]!r} cannot be looked up"
                )
            nodes = [nodes[int(place)] for place in places if place and int(place) < len(nodes)]
    if index >= len(nodes):
        raise DeviceError(
            f"device: cuda:{index} is not there, {len(nodes)} AMD device(s) are visible; look at rocm-smi"
        )
    facts = nodes[index]
    hardware = {
        "architecture": facts.get("gfx_target_version", "unknown"),
        "memory_bytes": int(facts["memory"]),
        "simd_count": int(facts["simd_count"]),
    }
    instance = {"unique_id": facts.get("unique_id", ""), "location": facts.get("location_id", ""), **_machine(root)}
    return DeviceIdentity("rocm", facts["product"] or "AMD device", index, hardware, instance)


def _apple_fact(name: str) -> str:
    if platform.system() != "Darwin":
        return ""
    answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False, timeout=10)
    return answer.stdout.strip()


def _apple() -> DeviceIdentity:
    name = _apple_fact("machdep.cpu.brand_string")
    if not name:
        raise DeviceError("device: mps needs a Mac; use cpu or cuda here")
    hardware = {"memory_bytes": int(_apple_fact("hw.memsize") or 0), "processors": os.cpu_count() or 1}
    return DeviceIdentity("mps", name, 0, hardware, {"machine": _apple_fact("kern.uuid"), "host": platform.node()})


def _read(path: Path) -> str:
    """Return a small system file's text, or nothing where the system has no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
