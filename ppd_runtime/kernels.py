"""The fastest exact way to compute the linear layers of a small step, chosen by measurement and named.

On a CPU a step's time is its linear layers, and which routine is fastest for how many rows differs between machines:
swapped operands were up to 2.9 times faster than ``F.linear`` on one and twice slower on the next. A *kernel plan* says
which routine serves which row counts, and which fused operations (`ppd_runtime.fused`) are on. Its name says all of it
(``gqa,rms,native:1-16,swap:17-48``; ``own`` is the model's own way), so latency profiles record it and ``kernels=NAME``
brings it back. A plan serves tree decoding and plain
decoding alike, and never holds a second copy of the weights.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as own_linear

from ppd_runtime import fused, native
from ppd_runtime.demo_model import cache_folder
from treeopt.artifact import write_text
from treeopt.errors import DocumentError, ModelError

__all__ = [
    "OWN",
    "KernelPlan",
    "PlannedLinear",
    "apply_plan",
    "choose_plan",
    "measure_routines",
    "plan_from_seconds",
    "planned_name",
    "remove_plan",
]

OWN = "own"
"""Name of the plan that changes nothing."""

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Row counts at which the routines are compared; each stands for those down to the one before it."""

MEASURED_BYTES = 256 * 2**20
"""Weights that one measurement reads: more than caches hold, so that memory is timed as in a real step."""

MEASURED_REPEATS = 5

MIN_GAIN = {"swap": 0.04, "native": -0.02}
"""Share of the time that a routine must save to replace the library's. Less than a few per cent is noise; the native
one may even cost a little, because its result for a row does not depend on how many rows share the pass: with it, a
tree's linear layers equal those of plain decoding to the last bit."""


def _swapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``(W x^T)^T``: the same product, with which some libraries choose a better routine for few rows."""
    rows = x.reshape(-1, x.shape[-1]).t()
    out = torch.mm(weight, rows) if bias is None else torch.addmm(bias.unsqueeze(1), weight, rows)
    return out.t().reshape(*x.shape[:-1], weight.shape[0])


Routine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
ROUTINES: dict[str, Routine] = {OWN: own_linear, "swap": _swapped, "native": native.linear}


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Which routine computes a linear layer, by its number of rows.

    Parameters
    ----------
    name : str
        ``own``, or joined by commas: fused operations (``gqa``, ``rms``), then parts ``routine:low-high``, both ends
        included, in increasing order. Row counts that no part names keep the model's own routine.

    Raises
    ------
    ModelError
        When the name is not of this form.

    Examples
    --------
    >>> plan = KernelPlan("gqa,native:1-3,swap:5-6")
    >>> plan.fused
    ('gqa',)
    >>> plan.parts
    (('native', 1, 3), ('swap', 5, 6))
    >>> plan.routines
    ('own', 'native', 'native', 'native', 'own', 'swap', 'swap')
    """

    name: str

    def __post_init__(self) -> None:
        if self.name.split(",")[: len(self.fused)] != list(self.fused):
            raise ModelError(_bad_name(self.name))
        reached = 0
        for routine, low, high in self.parts:
            if routine not in ROUTINES or not reached < low <= high <= 4096:
                raise ModelError(_bad_name(self.name))
            reached = high

    @property
    def fused(self) -> tuple[str, ...]:
        """The fused operations of the name."""
        words = self.name.split(",")
        return tuple(name for name in fused.FUSED if name in words)

    @property
    def parts(self) -> tuple[tuple[str, int, int], ...]:
        """The parts of the name as ``(routine, low, high)``."""
        names = [] if self.name == OWN else self.name.split(",")[len(self.fused) :]
        matches = [re.fullmatch(r"([a-z]+):([0-9]{1,4})-([0-9]{1,4})", name) for name in names]
        if not all(matches):
            raise ModelError(_bad_name(self.name))
        return tuple((match[1], int(match[2]), int(match[3])) for match in matches if match)

    @property
    def routines(self) -> tuple[str, ...]:
        """The routine of each row count from 0 to the largest one named."""
        parts = self.parts
        table = [OWN] * (1 + max((high for _, _, high in parts), default=0))
        for routine, low, high in parts:
            table[low : high + 1] = [routine] * (high + 1 - low)
        return tuple(table)

    @classmethod
    def from_routines(cls, routines: Sequence[str], fused: Sequence[str] = ()) -> "KernelPlan":
        """Name the plan whose row count ``i`` (from 0) uses ``routines[i]``, with fused operations.

        Examples
        --------
        >>> KernelPlan.from_routines(["own", "own", "swap", "swap", "native"]).name
        'swap:2-3,native:4-4'
        """
        parts: list[list[object]] = []
        for rows, routine in enumerate(routines):
            if routine == OWN:
                continue
            if parts and parts[-1][0] == routine and parts[-1][2] == rows - 1:
                parts[-1][2] = rows
            else:
                parts.append([routine, rows, rows])
        names = [*fused, *(f"{routine}:{low}-{high}" for routine, low, high in parts)]
        return cls(",".join(names) or OWN)


def _bad_name(name: str) -> str:
    routines = ", ".join(ROUTINES)
    return (
        f"kernels {name!r}: must be auto, own, or like gqa,rms,native:1-16,swap:17-48 in this order; "
        f"routines: {routines}"
    )


class PlannedLinear(nn.Linear):
    """A linear layer that picks its routine by the number of rows; weights and bias are the original's."""

    table: tuple[Routine, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + bias``, shape (..., outputs)."""
        rows = x.numel() // x.shape[-1]
        routine = self.table[rows] if rows < len(self.table) else own_linear
        return routine(x, self.weight, self.bias)


def apply_plan(model: nn.Module, plan: KernelPlan) -> None:
    """Let a model follow a plan: every plain linear layer, its head included, and the fused operations.

    The layers stay the same objects with the same parameters, hooks and names; only their class changes, as in
    ``torch.nn.utils.parametrize``. :func:`remove_plan` undoes it.

    Raises
    ------
    ModelError
        When the plan needs a routine that this machine or the model's type of weights lacks.
    """
    remove_plan(model)
    if plan.name == OWN:
        return
    layers = _linear_layers(model)
    if "native" in plan.routines:
        reason = native.unavailable_reason() or _native_misfit(layers)
        if reason is not None:
            raise ModelError(f"kernels {plan.name}: {reason}; use kernels auto or own")
    missing = sorted(set(plan.fused) - set(fused.usable(model)))
    if missing:
        raise ModelError(
            f"kernels {plan.name}: this model has no use for {', '.join(missing)}; use kernels auto or own"
        )
    fused.apply(model, plan.fused)
    table = tuple(ROUTINES[name] for name in plan.routines)
    for layer in layers if plan.parts else ():
        layer.__class__ = PlannedLinear
        layer.table = table


def remove_plan(model: nn.Module) -> None:
    """Give a model back its own layers and operations."""
    fused.remove(model)
    for layer in model.modules():
        if type(layer) is PlannedLinear:
            layer.__class__ = nn.Linear
            del layer.table


def planned_name(model: nn.Module) -> str:
    """Return the name of the plan that a model follows."""
    names = {function: name for name, function in ROUTINES.items()}
    tables = (layer.table for layer in model.modules() if type(layer) is PlannedLinear)
    routines = [names[function] for function in next(tables, ())]
    return KernelPlan.from_routines(routines, fused.applied(model)).name


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    # Subclasses (quantised, LoRA) compute something else and keep it.
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


def _native_misfit(layers: list[nn.Linear]) -> str | None:
    for layer in layers:
        if layer.weight.device.type != "cpu":
            return f"the native routine runs on the CPU, the model is on {layer.weight.device}"
        if layer.weight.dtype not in native.FUNCTIONS:
            return f"the native routine has no version for {layer.weight.dtype}"
        if not layer.weight.is_contiguous():
            return "the native routine needs contiguous weights"
    return None


def choose_plan(model: nn.Module) -> KernelPlan:
    """Measure once which routine is fastest for how many rows, and remember it in the user's cache.

    The answer holds for this processor, torch, type, number of threads and set of layer shapes; delete the folder
    ``kernels`` in treeopt's cache to measure again. On accelerators and for types that nobody decodes with (float64)
    the library's own routines are kept.

    Returns
    -------
    KernelPlan
        Takes a few seconds the first time.
    """
    layers = _linear_layers(model)
    if not layers or _native_misfit(layers) is not None:
        return KernelPlan(OWN)
    usable = [OWN, "swap"] + (["native"] if native.unavailable_reason() is None else [])
    identity = {
        "processor": native.processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(layers[0].weight.dtype),
        "shapes": sorted({tuple(layer.weight.shape) for layer in layers}),
        "routines": usable,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"{key}.json"
    try:
        routines = KernelPlan(json.loads(path.read_text(encoding="utf-8"))["plan"]).routines
        return KernelPlan.from_routines(routines, fused.usable(model))
    except (OSError, ValueError, KeyError, ModelError):  # not measured yet, or damaged: measure
        pass
    seconds = measure_routines(layers, usable)
    plan = plan_from_seconds(seconds)
    with suppress(DocumentError, OSError):  # not remembered, it is measured again at the next load
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps({**identity, "plan": plan.name, "seconds": seconds}, indent=1), path)
    return KernelPlan.from_routines(plan.routines, fused.usable(model))


def plan_from_seconds(seconds: dict[str, dict[int, float]]) -> KernelPlan:
    """Pick a routine per row count: the one that saves most, of those that save ``MIN_GAIN``; else the model's own.

    Examples
    --------
    >>> plan_from_seconds({"own": {1: 1.0, 2: 2.0, 4: 3.0}, "swap": {1: 0.99, 2: 1.0, 4: 1.5}}).name
    'swap:2-4'
    """
    routines = [OWN]
    for rows, own in seconds[OWN].items():
        candidates = [routine for routine, gain in MIN_GAIN.items() if routine in seconds]
        candidates = [routine for routine in candidates if seconds[routine][rows] <= own * (1 - MIN_GAIN[routine])]
        choice = min(candidates, key=lambda routine, rows=rows: seconds[routine][rows], default=OWN)
        routines += [choice] * (rows + 1 - len(routines))
    return KernelPlan.from_routines(routines)


@torch.inference_mode()
def measure_routines(layers: list[nn.Linear], routines: list[str]) -> dict[str, dict[int, float]]:
    """Time every routine on a model's own layers, in turns, and return the least seconds per row count."""
    sample, size = [], 0
    # The head comes last among the modules and is the largest: start there, then take layers in order.
    for layer in [layers[-1], *layers[:-1]]:
        if sample and size > MEASURED_BYTES:
            break
        sample.append(layer)
        size += layer.weight.numel() * layer.weight.element_size()
    seconds: dict[str, dict[int, float]] = {routine: {} for routine in routines}
    for rows in MEASURED_ROWS:
        inputs = {layer.in_features: layer.weight.new_ones(1, rows, layer.in_features) for layer in sample}
        for _ in range(MEASURED_REPEATS):
            for routine in routines:
                compute = ROUTINES[routine]
                start = time.perf_counter()
                for layer in sample:
                    compute(inputs[layer.in_features], layer.weight, layer.bias)
                elapsed = time.perf_counter() - start
                seconds[routine][rows] = min(elapsed, seconds[routine].get(rows, elapsed))
    return seconds
