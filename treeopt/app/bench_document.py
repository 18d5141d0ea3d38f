"""What a benchmark found, as JSON: a line per budget and per baseline, and one document with everything."""

from dataclasses import asdict
from typing import Any

from treeopt.app.bench_results import BaselineResult, BenchReport, BudgetResult
from treeopt.artifact import to_document

__all__ = ["baseline_object", "budget_object", "report_document"]


def budget_object(result: BudgetResult) -> dict[str, Any]:
    """Return one budget's line of ``treeopt bench --json``."""
    known = result.prediction
    return {
        "budget": result.budget,
        "state_sizes": list(result.design.sizes()),
        "predicted_tau": None if known is None else known.acceptance_length,
        "measured_tau": result.acceptance_length.value,
        "predicted_speedup": None if known is None else known.speedup,
        "predicted_low": None if known is None else known.low,
        "predicted_high": None if known is None else known.high,
        "measured_speedup": result.speedup.value,
        "measured_low": result.speedup.low,
        "measured_high": result.speedup.high,
        "identical": result.identical,
        "num_prompts": result.num_prompts,
        "num_tokens": result.num_tokens,
    }


def baseline_object(result: BaselineResult) -> dict[str, Any]:
    """Return one baseline's line of ``treeopt bench --json``."""
    return {
        "baseline": result.name,
        "pass_tokens": result.pass_tokens,
        "tokens_per_second": result.tokens_per_second,
        "measured_tau": result.acceptance_length,
        "measured_speedup": result.speedup.value,
        "measured_low": result.speedup.low,
        "measured_high": result.speedup.high,
        "identical": result.identical,
        "num_prompts": result.num_prompts,
        "num_tokens": result.num_tokens,
    }


def report_document(report: BenchReport) -> dict[str, Any]:
    """Return everything about a benchmark as one JSON document, ``treeopt.bench/1``."""
    head = ("model", "guesses", "device", "dtype", "kernels", "cache", "graph_mode", "context_len")
    return {
        "format": "treeopt.bench/1",
        **{name: getattr(report, name) for name in head},
        "budgets": [_detailed(result) for result in report.budgets],
        "baselines": [baseline_object(result) for result in report.baselines],
        "findings": list(report.findings),
        "latency": None if report.latency is None else to_document(report.latency),
    }


def _detailed(result: BudgetResult) -> dict[str, Any]:
    known = result.prediction
    return {
        **budget_object(result),
        "pass_tokens": list(result.design.pass_tokens),
        "tree": to_document(result.design),
        "tau_by_model": {} if known is None else known.tau_by_model,
        "predicted_tau_low": None if known is None else known.tau_low,
        "predicted_tau_high": None if known is None else known.tau_high,
        "measured_tau_low": result.acceptance_length.low,
        "measured_tau_high": result.acceptance_length.high,
        "predicted_occupancy": None if known is None else list(known.occupancy),
        "num_steps": result.num_steps,
        "occupancy": list(result.occupancy),
        "tokens_per_second": result.tokens_per_second,
        "over": {name: asdict(estimate) for name, estimate in result.over.items()},
        "split": asdict(result.split),
    }
