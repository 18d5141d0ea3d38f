"""Which device is which: class, instance, and what the environment variables leave visible."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import profiler.device
from profiler.device import default_threads, identify
from profiler.environment import environment, torch_build
from profiler.flags import Conditions, visit_flags
from profiler.idle import IdlePolicy, blockers
from profiler.nvidia import driver_version, gpu_activity, visible_nvidia_devices
from profiler.probe import CpuTimes, Probe, foreign_share
from tests.profiler.fake_nvml import Card, FakeNvml
from treeopt.errors import DeviceError

TWINS = FakeNvml(Card("GPU-aaaa"), Card("GPU-bbbb"))


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler.device, "torch_build", lambda: {"version": "2.13.0", "cuda": "12.8"})


def visible(nvml: FakeNvml, listed: str | None = None, **environ: str) -> list[str]:
    if listed is not None:
        environ["CUDA_VISIBLE_DEVICES"] = listed
    return [device.uuid for device in visible_nvidia_devices(nvml=nvml, environ=environ)]


def test_two_equal_cards_are_two_instances_of_one_class() -> None:
    first, second = (identify(f"cuda:{i}", nvml=TWINS, environ={}) for i in range(2))
    assert first.class_digest == second.class_digest
    assert first.instance_digest != second.instance_digest
    assert first.lock_key != second.lock_key
    assert (first.torch_name, second.torch_name) == ("cuda:0", "cuda:1")
    assert TWINS.open == 0, "NVML is shut down again"


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 80 * 2**30},
        {"power_mw": 500_000},
        {"capability": (8, 0)},
        {"name": "NVIDIA H100"},
        {"power_mw": None},
    ],
)
def test_another_memory_size_or_power_limit_is_another_class(change: dict[str, object]) -> None:
    known = identify("cuda", nvml=FakeNvml(Card("GPU-aaaa")), environ={})
    other = identify("cuda", nvml=FakeNvml(Card("GPU-aaaa", **change)), environ={})
    assert known.class_digest != other.class_digest
    assert known.lock_key == other.lock_key, "it is still the same piece of hardware"


def test_the_document_names_the_class_and_keeps_the_serial_number_out() -> None:
    document = identify("cuda", nvml=TWINS, environ={}).to_document()
    assert document["name"] == "NVIDIA H200"
    assert document["hardware"] == {
        "memory_bytes": 141 * 2**30,
        "compute_capability": "9.0",
        "power_limit_w": 700.0,
        "mig": False,
    }
    assert "GPU-aaaa" not in json.dumps(document)


def test_visible_devices_by_index_uuid_and_its_beginning() -> None:
    assert visible(TWINS) == ["GPU-aaaa", "GPU-bbbb"]
    assert visible(TWINS, "1") == ["GPU-bbbb"]
    assert visible(TWINS, "1,0") == ["GPU-bbbb", "GPU-aaaa"]
    assert visible(TWINS, "GPU-b") == ["GPU-bbbb"]
    assert visible(TWINS, "") == []
    assert visible(TWINS, "-1") == []
    assert visible(TWINS, "0,-1,1") == ["GPU-aaaa"], "the first entry that names nothing ends the list"
    assert visible(TWINS, "0,7,1") == ["GPU-aaaa"]
    assert visible(TWINS, "GPU-") == [], "ambiguous"


def test_mig_slices_are_devices_of_their_own() -> None:
    parts = [Card(f"MIG-{i}", name="NVIDIA H200 MIG 1g.18gb", memory=18 * 2**30) for i in range(2)]
    nvml = FakeNvml(Card("GPU-aaaa", slices=parts), Card("GPU-bbbb"))
    assert visible(nvml, "0") == ["MIG-0"], "a card in MIG mode stands for its first slice"
    assert visible(nvml, "MIG-1") == ["MIG-1"]
    part = identify("cuda", nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    whole = identify("cuda", nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert part.hardware["mig"] is True
    assert part.class_digest != whole.class_digest


def test_unlike_cards_by_index_need_the_pci_order() -> None:
    nvml = FakeNvml(Card("GPU-slow", name="NVIDIA T4"), Card("GPU-fast"))
    with pytest.raises(DeviceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible(nvml)
    assert visible(nvml, CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-slow", "GPU-fast"]
    assert visible(nvml, "GPU-fast") == ["GPU-fast"], "a UUID is never ambiguous"


def test_missing_cards_and_drivers_are_one_line() -> None:
    with pytest.raises(DeviceError, match="cuda:2 is not there, 2 NVIDIA"):
        identify("cuda:2", nvml=TWINS, environ={})
    with pytest.raises(DeviceError, match=r"no NVIDIA driver answers \(Driver Not Loaded\)"):
        identify("cuda", nvml=FakeNvml(driver=False), environ={})
    for wrong in ("gpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(DeviceError, match="is not auto"):
            identify(wrong, environ={})


def test_auto_takes_what_torch_would_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert identify("auto", nvml=TWINS, environ={}).kind == "cuda"
    assert identify("auto", nvml=TWINS, environ={"CUDA_VISIBLE_DEVICES": ""}).kind == "cpu"
    assert identify("auto", nvml=FakeNvml(driver=False), environ={}, root=tmp_path).kind == "cpu"
    monkeypatch.setattr(profiler.device, "torch_build", lambda: {"version": "2.13.0+cpu"})
    assert identify("auto", environ={}).kind == "cpu"


def test_what_a_card_is_doing() -> None:
    card = Card("GPU-aaaa", pids=[os.getpid(), 1, 2], utilisation=37, reasons=0x4)
    activity = gpu_activity("GPU-aaaa", nvml=FakeNvml(card))
    assert (activity.foreign_processes, activity.utilisation) == (2, 0.37)
    assert activity.throttled is False, "the power cap belongs to a card's normal speed"
    for reason in (0x8, 0x20, 0x40, 0x80):
        card.reasons = reason
        assert gpu_activity("GPU-aaaa", nvml=FakeNvml(card)).throttled is True


def test_what_mig_cannot_tell_is_unknown_and_unknown_is_not_idle() -> None:
    part = Card("MIG-0", utilisation=None, pids=[])
    nvml = FakeNvml(Card("GPU-aaaa", slices=[part]))
    activity = gpu_activity("MIG-0", nvml=nvml)
    assert activity.utilisation is None
    device = identify("cuda", nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "MIG-0"})
    probe = Probe(device, activity=lambda _device: activity, cpu_times=ticking([0.0, 1.0, 2.0, 3.0]))
    seen = probe.observe()
    assert seen.gpu_utilisation is None
    from datetime import datetime

    reasons = blockers(seen, IdlePolicy(), datetime(2026, 1, 1))
    assert any("utilisation is unknown" in reason for reason in reasons)


def test_a_card_that_vanishes_is_one_line() -> None:
    with pytest.raises(DeviceError, match=r"driver failed \(GPU is lost\)"):
        gpu_activity("GPU-aaaa", nvml=FakeNvml(Card("GPU-aaaa", lost=True)))
    assert driver_version(FakeNvml()) == "580.1"


CPUINFO = """processor\t: 0
model name\t: Imaginary 9000
cpu family\t: 6
model\t\t: 207
stepping\t: 2
flags\t\t: fpu sse2 avx2 avx512f amx_bf16
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "etc" / "machine-id").write_text("abc\n")
    return tmp_path


def test_a_processor_is_model_threads_and_instruction_sets(root: Path) -> None:
    known = identify("cpu", root=root, environ={"OMP_NUM_THREADS": "4"})
    assert known.name == "Imaginary 9000"
    assert known.hardware["threads"] == 4
    assert known.hardware["isa"] == ["avx2", "avx512f", "amx_bf16"]
    fewer = identify("cpu", root=root, environ={"OMP_NUM_THREADS": "1"})
    assert fewer.class_digest != known.class_digest
    assert fewer.lock_key == known.lock_key, "one processor is measured once at a time, whatever the threads"
    (root / "etc" / "machine-id").write_text("def\n")
    twin = identify("cpu", root=root, environ={"OMP_NUM_THREADS": "4"})
    assert twin.class_digest == known.class_digest
    assert twin.instance_digest != known.instance_digest
    (root / "proc" / "cpuinfo").write_text(CPUINFO.replace("amx_bf16", ""))
    assert identify("cpu", root=root, environ={"OMP_NUM_THREADS": "4"}).class_digest != known.class_digest


def test_threads_follow_the_variable_and_the_containers_quota(root: Path) -> None:
    assert default_threads({"OMP_NUM_THREADS": "3,2"}, root) == 3
    usable = len(os.sched_getaffinity(0))
    assert default_threads({"OMP_NUM_THREADS": "many"}, root) == usable
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert default_threads({}, root) == 1
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert default_threads({}, root) == usable


def test_amd_cards_are_read_from_the_kernel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler.device, "torch_build", lambda: {"version": "2.13.0", "hip": "6.4"})
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for number, (simds, unique) in enumerate([(0, 0), (304, 11), (304, 12)]):  # node 0 is the processor
        (nodes / str(number) / "mem_banks/0").mkdir(parents=True)
        (nodes / str(number) / "name").write_text("aqua_vanjaram\n")
        (nodes / str(number) / "properties").write_text(
            f"simd_count {simds}\ngfx_target_version 90402\nunique_id {unique}\nlocation_id {number}\n"
        )
        (nodes / str(number) / "mem_banks/0/properties").write_text("size_in_bytes 206141652992\n")
    first, second = (identify(f"cuda:{i}", root=root, environ={}) for i in range(2))
    assert first.kind == "rocm"
    assert identify("auto", root=root, environ={}).instance_digest == first.instance_digest
    assert first.class_digest == second.class_digest
    assert first.instance_digest != second.instance_digest
    hidden = identify("cuda:0", root=root, environ={"HIP_VISIBLE_DEVICES": "1"})
    assert hidden.instance_digest == second.instance_digest
    with pytest.raises(DeviceError, match="cuda:2 is not there, 2 AMD"):
        identify("cuda:2", root=root, environ={})


def test_identity_and_environment_need_no_torch() -> None:
    script = (
        "import sys; from profiler.device import identify; from profiler.environment import environment\n"
        "d = identify('cpu'); e = environment('cpu')\n"
        "assert 'torch' not in sys.modules and 'psutil' not in sys.modules and 'pynvml' not in sys.modules\n"
        "print(d.instance_digest, e['torch'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    digest, version = done.stdout.split()
    assert digest == identify("cpu").instance_digest, "the same in every process"
    import torch

    assert version == torch.__version__
    assert torch_build()["version"] == torch.__version__
    assert environment("cpu")["transformers"]


def ticking(walls: list[float], busy: list[float] | None = None, own: list[float] | None = None):
    readings = iter(CpuTimes(wall, (busy or walls)[i], (own or walls)[i], processors=2) for i, wall in enumerate(walls))
    return lambda: next(readings)


def test_the_share_of_others_leaves_out_this_process() -> None:
    before, after = CpuTimes(0, 0, 0, 4), CpuTimes(2, 6, 2, 4)
    assert foreign_share(before, after) == 0.5
    assert foreign_share(before, CpuTimes(1, 0.5, 1, 4)) == 0.0, "ticks may make the difference negative"
    assert foreign_share(before, before) == 0.0


def test_short_intervals_reuse_the_last_share() -> None:
    device = identify("cpu")
    times = ticking([0.0, 0.1, 1.0, 1.1], busy=[0.0, 0.2, 2.0, 2.2], own=[0.0, 0.1, 0.5, 0.5])
    probe = Probe(device, cpu_times=times, throttle_count=lambda: None)
    assert probe.conditions() == Conditions(foreign_cpu=None)
    assert probe.conditions().foreign_cpu == 0.75
    assert visit_flags(probe.conditions()) == {"contended"}


def test_a_processor_that_gets_too_hot_is_throttled() -> None:
    counts = iter([3, 3, 4, None])
    probe = Probe(identify("cpu"), cpu_times=ticking([0.0, 1.0, 2.0, 3.0]), throttle_count=lambda: next(counts))
    assert [probe.conditions().throttled for _ in range(3)] == [False, True, None]
