"""Use case: everything that is known of a model on a machine, as one HTML page that needs nothing else."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.acceptance import acceptance_trie
from treeopt.app.advise import Advice
from treeopt.app.advise_text import (
    against_best,
    break_even_line,
    doubt_line,
    headline,
    interval,
    reason,
    tied_line,
    wider_or_deeper,
)
from treeopt.app.sweep import sweep_budgets, sweep_figure
from treeopt.artifact import digest
from treeopt.draw import counted
from treeopt.report.page import inline_svg, render_report
from treeopt.search import search
from treeopt.types import AcceptanceTable, LatencyPoint, LatencyProfile, TreeDesign

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from treeopt.speedup_plot import BenchCurves

__all__ = ["report_page"]

NUM_BUDGETS = 24
"""Budgets of the sweep at most."""


def report_page(
    advice: Advice,
    *,
    acceptance_model: str = "independent",
    bench: "BenchCurves | None" = None,
    command: str = "treeopt report",
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return the report as one HTML page.

    Parameters
    ----------
    advice : Advice
        From `treeopt.app.advise.advise`.
    acceptance_model : {"independent", "joint"}
        As the advice was given under.
    bench : BenchCurves, optional
        A benchmark to show predicted against measured speedup of.
    command : str
        The command that makes the page, to be shown in it.
    progress : callable, optional
        Called with one line per part.

    Raises
    ------
    TreeOptError
        When the parts do not belong together or jinja2 is missing.
    """
    from treeopt.picture import design_figure

    say = progress or (lambda text: None)
    table, latency = advice.table, advice.latency
    design = search(table, advice.budget, latency, acceptance_model=acceptance_model)
    say("search")
    trie = acceptance_trie(table, acceptance_model)
    points = sweep_budgets(table, _budgets(advice.budget, latency), latency, acceptance_model=acceptance_model)
    say("sweep")
    values: dict[str, Any] = {
        "model": table.model,
        "device": latency.device["name"],
        "budget": advice.budget,
        "conditions": f"{latency.dtype}, batch {latency.batch_size}, context {latency.context_len}",
        "headline": _times(headline(advice)),
        "reason": _times(reason(advice)),
        "cards": _cards(advice, design),
        "contenders": _contenders(advice),
        "tied": tied_line(advice),
        "doubt": doubt_line(advice),
        "marginal": wider_or_deeper(advice),
        "break_even_line": break_even_line(advice.break_even),
        "break_even": _break_even(advice),
        "proof": f"Proven: under the {acceptance_model} acceptance model no design within the budget beats "
        f"{design.upper_bound:.6f} tokens per second.",
        "tree_line": _tree_line(design),
        "latencies": _latencies(latency),
        "ranks": range(table.num_ranks),
        "acceptance": _acceptance(table),
        "acceptance_line": table.source[:1].upper() + table.source[1:] + ".",
        "facts": _facts(advice),
        "command": command,
        "sweep_figure": inline_svg(
            sweep_figure(points, table, latency, acceptance_model), "sweep", "Speedup and tokens per step over budgets"
        ),
        "tree_figure": inline_svg(design_figure(design, trie, model=table.model), "tree", "The tree of each state"),
        "latency_figure": inline_svg(_latency_figure(latency, table.model), "latency", "Step latency over tokens"),
        "speedup_figure": None,
        "speedup_caption": "",
    }
    if bench is not None:
        values.update(_measured(bench))
    say("pictures")
    return render_report(values)


def _budgets(budget: int, latency: LatencyProfile) -> list[int]:
    """Budgets at which the answer can change: the measured ones, thinned out evenly."""
    sizes = [point.num_tokens for point in latency.points if point.num_tokens <= budget]
    step = max(1, -(-len(sizes) // NUM_BUDGETS))
    return sorted({*sizes[::step], sizes[-1]})


def _times(text: str) -> str:
    """Write ratios as on paper: 1.5x becomes 1.5×."""
    return re.sub(r"(?<=\d)x\b", "×", text)


def _fact(name: str, value: object) -> dict[str, str]:
    return {"name": name, "value": str(value)}


def _cards(advice: Advice, design: TreeDesign) -> list[dict[str, str]]:
    best = advice.verdict.best
    cards = [
        _fact("expected speedup over plain decoding", f"{best.speedup:.3f}×"),
        _fact("95 % interval", _times(interval(best)) if best.kind != "none" else "—"),
        _fact("tokens per step", f"{best.acceptance_length:.3f}"),
        _fact("tokens per second, predicted", f"{best.speedup / advice.latency.median_s(1):.1f}"),
    ]
    reached = design.tokens_per_second or 0.0
    if design.upper_bound:
        cards.append(_fact("gap to the proven bound", f"{max(0.0, 1 - reached / design.upper_bound):.1e}"))
    return cards


def _contenders(advice: Advice) -> list[dict[str, str]]:
    return [
        {
            "name": each.name,
            "tau": f"{each.acceptance_length:.3f}",
            "speedup": f"{each.speedup:.3f}×",
            "interval": "" if each.kind == "none" else _times(interval(each)),
            "against": against_best(each, advice.verdict),
        }
        for each in advice.shown
    ]


def _break_even(advice: Advice) -> list[dict[str, object]]:
    return [
        {
            "batch": row.batch_size,
            "context": row.context_len,
            "num_tokens": row.num_tokens,
            "needed": f"{row.needed:.3f}",
            "has": f"{row.acceptance_length:.3f}",
            "speedup": f"{row.speedup:.3f}×",
            "kind": row.kind,
        }
        for row in advice.break_even
    ]


def _tree_line(design: TreeDesign) -> str:
    passes = ", ".join(f"{tokens} in state {k}" for k, tokens in enumerate(design.pass_tokens))
    return f"The optimum under the acceptance model pads its passes to {passes}."


def _quartiles(point: LatencyPoint) -> tuple[float, float]:
    """Lower and upper quartile of a point's step times, seconds; the median twice where nothing is known."""
    if point.samples_s is not None:
        import numpy as np

        low, high = np.quantile(point.samples_s, [0.25, 0.75])
        return float(low), float(high)
    half_s = (point.iqr_s or 0.0) / 2
    return point.median_s - half_s, point.median_s + half_s


def _latencies(latency: LatencyProfile) -> list[dict[str, str]]:
    plain_s = latency.median_s(1)
    rows = []
    for point in latency.points:
        low_s, high_s = _quartiles(point)
        known = point.samples_s is not None or point.iqr_s is not None
        count = point.num_samples if point.samples_s is None else len(point.samples_s)
        rows.append(
            {
                "num_tokens": str(point.num_tokens),
                "median": f"{1e3 * point.median_s:.2f}",
                "iqr": f"{1e3 * (high_s - low_s):.2f}" if known else "unknown",
                "count": "unknown" if count is None else str(count),
                "ratio": f"{point.median_s / plain_s:.3f}",
            }
        )
    return rows


def _latency_figure(latency: LatencyProfile, model: str) -> "Figure":
    from treeopt.plot import Curve, Panel, curves_figure

    bands = [_quartiles(point) for point in latency.points]
    curve = Curve(
        "median",
        [point.num_tokens for point in latency.points],
        [1e3 * point.median_s for point in latency.points],
        [1e3 * low for low, _ in bands],
        [1e3 * high for _, high in bands],
    )
    place = f"{latency.device['name']}, {latency.dtype}, batch {latency.batch_size}, context {latency.context_len}"
    panel = Panel("step latency (ms)", [curve], (1e3 * latency.median_s(1), "one token"))
    return curves_figure("What a pass costs", f"{model}\n{place}", [panel], "tokens in one pass")


def _acceptance(table: AcceptanceTable) -> list[dict[str, Any]]:
    return [
        {
            "distance": j + 1,
            "cells": [{"share": f"{100 * share:.1f}", "shade": f"{min(0.6, share):.2f}"} for share in row],
            "total": f"{100 * sum(row):.1f}",
        }
        for j, row in enumerate(table.marginals)
    ]


def _facts(advice: Advice) -> list[dict[str, str]]:
    table, latency = advice.table, advice.latency
    guesses = (table.num_distances, "distance"), (table.num_ranks, "rank"), (table.tokens_per_prompt_token, "token")
    facts = [_fact("model", table.model), _fact("device", latency.device["name"])]
    facts += [
        _fact(f"device {name}", value)
        for name, value in _flat(latency.device)
        if name != "name" and value not in (None, "")
    ]
    facts += [
        _fact("number format", latency.dtype),
        _fact("attention", latency.attention),
        _fact("passes run", latency.graph_mode),
        _fact("KV cache", latency.cache or "unknown"),
        _fact("kernels", latency.kernels or "unknown"),
        *(_fact(name, version) for name, version in sorted((latency.versions or {}).items())),
        _fact("latency flags", ", ".join(latency.flags or ()) or "none"),
        _fact("guesses", ", ".join(counted(*each) for each in guesses) + " per prompt token"),
        _fact("acceptance rule", table.rule),
        _fact("recorded positions", "unknown" if table.num_samples is None else f"{table.num_samples:,}"),
        _fact("acceptance digest", digest(table)),
        _fact("latency digest", digest(latency)),
    ]
    return facts


def _flat(device: Any, prefix: str = "") -> Sequence[tuple[str, object]]:
    """Name and value of everything in a device's identity, inner objects spelled out."""
    found: list[tuple[str, object]] = []
    for name, value in device.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name} ")
        elif isinstance(value, list | tuple):
            found.append((f"{prefix}{name}".replace("_", " "), ", ".join(map(str, value))))
        else:
            found.append((f"{prefix}{name}".replace("_", " "), value))
    return found


def _measured(bench: "BenchCurves") -> dict[str, str]:
    from treeopt.speedup_plot import best_measured, best_predicted, speedup_figure

    measured, predicted = best_measured(bench.points), best_predicted(bench.points)
    caption = f"Best measured: {measured.measured:.3f}× at budget {measured.budget}."
    if predicted is not None:
        caption += f" Best predicted: {predicted.predicted:.3f}× at budget {predicted.budget}."
    return {
        "speedup_figure": inline_svg(speedup_figure(bench), "speedup", "Predicted and measured speedup over budgets"),
        "speedup_caption": caption,
    }
