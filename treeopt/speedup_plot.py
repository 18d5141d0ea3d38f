"""Predicted against measured, over tree sizes: speedup, tokens per step, and the latency curve beneath.

The paper shows theoretical and measured speedup side by side (Figures 8b and 8c); here they share axes, with intervals.
What is drawn comes from the document that ``treeopt bench --out`` writes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, ValidationError

from treeopt.artifact import from_document, read_json
from treeopt.errors import DocumentError
from treeopt.plot import Curve, Mark, Panel, curves_figure
from treeopt.types import LatencyProfile

__all__ = ["BenchCurves", "SpeedupPoint", "best_measured", "best_predicted", "read_bench", "speedup_figure"]

MODEL_NAMES = {"independent": "independent", "joint": "joint counts", "replay": "replay"}


@dataclass(frozen=True, slots=True)
class SpeedupPoint:
    """One design: predicted and measured, each with its 95 % interval where known.

    Parameters
    ----------
    budget : int
        Tokens of a pass at most.
    measured, measured_low, measured_high : float
        Speedup over plain decoding.
    predicted, predicted_low, predicted_high : float or None
        The same, promised.
    tau, tau_low, tau_high : float
        Achieved tokens per step.
    tau_by_model : mapping of str to float
        Promised tokens per step: independent, joint, replay.
    step_s : float
        Mean time of a step, seconds.
    """

    budget: int
    measured: float
    measured_low: float | None
    measured_high: float | None
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    tau: float
    tau_low: float | None
    tau_high: float | None
    tau_by_model: Mapping[str, float]
    step_s: float


@dataclass(frozen=True, slots=True)
class BenchCurves:
    """What a benchmark document holds for a picture: where it ran, its points, and the latency curve it used."""

    model: str
    guesses: str
    device: str
    dtype: str
    kernels: str
    graph_mode: str
    context_len: int
    points: tuple[SpeedupPoint, ...]
    generate: float | None
    latency: LatencyProfile | None


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class _Split(_Shape):
    step_s: float


class _Budget(_Shape):
    budget: int
    measured_speedup: float
    measured_low: float | None
    measured_high: float | None
    predicted_speedup: float | None
    predicted_low: float | None
    predicted_high: float | None
    measured_tau: float
    measured_tau_low: float | None
    measured_tau_high: float | None
    tau_by_model: dict[str, float]
    split: _Split


class _Baseline(_Shape):
    baseline: str
    measured_speedup: float


class _Bench(_Shape):
    format: Literal["treeopt.bench/1"]
    model: str
    guesses: str
    device: str
    dtype: str
    kernels: str
    graph_mode: str
    context_len: int
    budgets: list[_Budget]
    baselines: list[_Baseline]
    latency: dict[str, Any] | None


def read_bench(path: str | os.PathLike[str]) -> BenchCurves:
    """Read what ``treeopt bench --out`` wrote.

    Raises
    ------
    DocumentError
        When the file cannot be read or is no such document.
    """
    document = read_json(path)
    try:
        shape = _Bench.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "document"
        raise DocumentError(
            f"{os.fspath(path)}: {place}: {first['msg'].lower()}; give a file written by treeopt bench --out"
        ) from error
    if not shape.budgets:
        raise DocumentError(f"{os.fspath(path)}: budgets: is empty; run treeopt bench with at least one budget")
    latency = None
    if shape.latency is not None:
        latency = from_document(shape.latency, f"{os.fspath(path)}: latency", LatencyProfile)
    points = [
        SpeedupPoint(
            budget=each.budget,
            measured=each.measured_speedup,
            measured_low=each.measured_low,
            measured_high=each.measured_high,
            predicted=each.predicted_speedup,
            predicted_low=each.predicted_low,
            predicted_high=each.predicted_high,
            tau=each.measured_tau,
            tau_low=each.measured_tau_low,
            tau_high=each.measured_tau_high,
            tau_by_model=each.tau_by_model,
            step_s=each.split.step_s,
        )
        for each in shape.budgets
    ]
    return BenchCurves(
        model=shape.model,
        guesses=shape.guesses,
        device=shape.device,
        dtype=shape.dtype,
        kernels=shape.kernels,
        graph_mode=shape.graph_mode,
        context_len=shape.context_len,
        points=tuple(sorted(points, key=lambda point: point.budget)),
        generate=next((each.measured_speedup for each in shape.baselines if each.baseline == "generate"), None),
        latency=latency,
    )


def best_measured(points: Sequence[SpeedupPoint]) -> SpeedupPoint:
    """Return the point with the highest measured speedup, the smallest budget among equals."""
    return max(points, key=lambda point: (point.measured, -point.budget))


def best_predicted(points: Sequence[SpeedupPoint]) -> SpeedupPoint | None:
    """Return the point with the highest predicted speedup, the smallest budget among equals; None without any."""
    known = [point for point in points if point.predicted is not None]
    return max(known, key=lambda point: (point.predicted or 0.0, -point.budget), default=None)


def speedup_figure(bench: BenchCurves) -> Figure:
    """Draw speedup, tokens per step and latency over budgets, predicted and measured.

    Parameters
    ----------
    bench : BenchCurves
        From `read_bench`.

    Returns
    -------
    Figure
        Bands are 95 % intervals; the star is the measured optimum, the diamond the predicted one.
    """
    panels = [_speedup_panel(bench), _tau_panel(bench.points), _latency_panel(bench)]
    subtitle = (
        f"{bench.model}, {bench.guesses} guesses, {bench.dtype}, {bench.graph_mode}, "
        f"context about {bench.context_len}\n"
        f"{bench.device}, {bench.kernels} kernels"
    )
    return curves_figure("Predicted and measured speedup", subtitle, panels, "budget (tokens per forward pass)")


def _curve(
    name: str, points: Sequence[SpeedupPoint], value: str, low: str | None, high: str | None, style: int
) -> Curve | None:
    """Return a curve of the points that have the value, with a band when all of them have an interval."""
    known = [point for point in points if getattr(point, value) is not None]
    if not known:
        return None
    band = low is not None and high is not None and all(getattr(point, low) is not None for point in known)
    return Curve(
        name,
        [point.budget for point in known],
        [getattr(point, value) for point in known],
        [getattr(point, str(low)) for point in known] if band else None,
        [getattr(point, str(high)) for point in known] if band else None,
        style,
    )


def _speedup_panel(bench: BenchCurves) -> Panel:
    points = bench.points
    measured, predicted = best_measured(points), best_predicted(points)
    curves = [
        _curve("measured", points, "measured", "measured_low", "measured_high", 0),
        _curve("predicted", points, "predicted", "predicted_low", "predicted_high", 1),
    ]
    if predicted is not None and predicted.predicted is not None:
        curves.append(Curve(f"best predicted: {predicted.budget}", [predicted.budget], [predicted.predicted], style=3))
    return Panel(
        "speedup\n(× plain decoding)",
        [curve for curve in curves if curve is not None],
        (1.0, "_nolegend_"),  # the axis says what 1 is
        Mark(measured.budget, measured.measured, f"best measured: {measured.budget}"),
    )


def _tau_panel(points: Sequence[SpeedupPoint]) -> Panel:
    curves = [_curve("achieved", points, "tau", "tau_low", "tau_high", 0)]
    for style, (model, name) in enumerate(MODEL_NAMES.items(), start=1):
        known = [point for point in points if model in point.tau_by_model]
        if known:
            budgets = [point.budget for point in known]
            curves.append(Curve(name, budgets, [point.tau_by_model[model] for point in known], style=style))
    return Panel("acceptance length\n(tokens per step)", [curve for curve in curves if curve is not None])


def _latency_panel(bench: BenchCurves) -> Panel:
    """Draw the curve that predictions used, with quartiles of its raw times, and the steps that were really taken."""
    budgets = [point.budget for point in bench.points]
    curves = [Curve("mean step, measured", budgets, [1e3 * point.step_s for point in bench.points], style=0)]
    if bench.latency is not None:
        shown = [point for point in bench.latency.points if point.num_tokens <= max(budgets)]
        low = high = None
        if all(point.samples_s is not None for point in shown):
            low = [1e3 * float(np.quantile(point.samples_s or (), 0.25)) for point in shown]
            high = [1e3 * float(np.quantile(point.samples_s or (), 0.75)) for point in shown]
        medians = [1e3 * point.median_s for point in shown]
        curves.append(Curve("L(n), the curve used", [point.num_tokens for point in shown], medians, low, high, 1))
    return Panel("latency of a step\n(ms)", curves)
