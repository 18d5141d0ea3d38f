"""Tables for people: what a search found, and what each acceptance model says of a design."""

import math

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from treeopt.acceptance import acceptance_trie
from treeopt.app.evaluate import Assessment
from treeopt.app.search import Inputs, SearchReport
from treeopt.cli.common import print_table, shows_unicode
from treeopt.draw import counted, draw_design
from treeopt.markov import Evaluation
from treeopt.types import TreeDesign

__all__ = ["print_assessment", "print_replay_counts", "print_search", "print_states"]


LEGEND = (
    "tau: tokens per step (plain decoding: 1). State: prompt tokens behind the last accepted token, that is, how many "
    "tokens ahead the next tree may guess. Pass: tokens that are run; size: those of the tree. f(T): tokens that a "
    "step in the state yields."
)

_MOST_DRAWN = 64
"""Candidates of a tree that is drawn below the figures."""


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _number(value: float | None, digits: int = 6) -> str:
    """Write a figure with so many digits behind the point; small ones with as many digits that count."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" if value >= 1 else f"{value:#.{digits}g}"


def _rounded_up(bound: float | None) -> str:
    """Write an upper bound with the digits of tau: cut, it would lie below what was reached."""
    if not bound:
        return ""
    digits = 6 if bound >= 1 else 6 - math.floor(math.log10(bound))
    return f"{math.ceil(bound * 10**digits - 1e-3) / 10**digits:.{digits}f}"


def print_search(report: SearchReport, inputs: Inputs, console: Console) -> None:
    """Print the methods side by side, the proof, the states, and tau by each model."""
    design, latency = report.design, inputs.latency
    aim = "tokens per step (tau)" if latency is None else "tokens per second"
    console.print(f"{inputs.table.model}: best {aim} within {counted(design.budget or 1, 'token')} a pass")
    if latency is not None:
        last = latency.points[-1].num_tokens
        place = (
            f"on {latency.device['name']}, {latency.dtype}, batch {latency.batch_size}, context {latency.context_len}"
        )
        console.print(f"latency: {place}")
        if latency.batch_size > 1:
            console.print(f"tokens per second are of one of the {latency.batch_size} texts; all states share one size")
        if design.budget is not None and design.budget > last:
            console.print(f"sizes above {counted(last, 'token')} were not measured, so they are not considered")
    table = _table("method", "tau", "gap to bound", *(() if latency is None else ("tokens/s", "speedup")))
    for entry in (design, report.other):
        if entry is not None:
            table.add_row(*_method_row(entry, latency is not None))
    print_table(table, console)
    if report.other_missing is not None:
        console.print(f"no greedy beside it: {report.other_missing}")
    own = _own_evaluation(design, report.assessment)
    model = f"under the {design.acceptance_model} acceptance model"
    unit = "tokens per step" if latency is None else "tokens per second"
    console.print(f"proof: no design beats {_rounded_up(design.upper_bound)} {unit} {model}")
    if own is not None and _speaks_plainly(design, own):
        console.print("No speculation is best here: decode one token a pass.")
    print_states(design, report.assessment, console)
    console.print(LEGEND, style="dim")
    print_assessment(report.assessment, console)
    if own is not None:
        _print_busiest_tree(design, own, inputs, console)


def _own_evaluation(design: TreeDesign, assessment: Assessment) -> Evaluation | None:
    """Return the value of a design under the model that it was made under."""
    joint = design.acceptance_model == "joint" and assessment.joint is not None
    return assessment.joint if joint else assessment.independent


def _print_busiest_tree(design: TreeDesign, evaluation: Evaluation, inputs: Inputs, console: Console) -> None:
    """Draw the tree that most steps use, unless it would push the figures off the screen."""
    busiest = max(range(len(evaluation.occupancy)), key=lambda k: evaluation.occupancy[k])
    num_candidates = design.trees[busiest].num_candidates
    if num_candidates > _MOST_DRAWN:
        console.print(
            f"the tree of state {busiest} has {num_candidates} candidates: write the design with --out, draw it with "
            "treeopt show"
        )
        return
    console.print("the tree that most steps use (--out writes all of them, treeopt show draws them):")
    trie = acceptance_trie(inputs.table, design.acceptance_model or "independent")
    drawing = draw_design(design, trie, states=[busiest], ascii_only=not shows_unicode())
    console.print(drawing, soft_wrap=True)


def _method_row(design: TreeDesign, with_speed: bool) -> tuple[str, ...]:
    reached = design.tokens_per_second if with_speed else design.acceptance_length
    gap = (design.upper_bound or 0.0) - (reached or 0.0)
    row = (design.method, _number(design.acceptance_length), f"{gap:.1e}")
    return (*row, _number(design.tokens_per_second, 3), _number(design.speedup, 4)) if with_speed else row


def _speaks_plainly(design: TreeDesign, evaluation: Evaluation) -> bool:
    """Whether every state that is ever entered has a bare root: plain decoding."""
    return all(
        tree.num_candidates == 0 for tree, share in zip(design.trees, evaluation.occupancy, strict=True) if share > 0
    )


def print_states(design: TreeDesign, assessment: Assessment, console: Console) -> None:
    """Print one row per state: how often it is used, what its pass holds, what it yields, by the design's own model."""
    evaluation = _own_evaluation(design, assessment)
    table = _table("state", "steps", "pass", "size", "candidates", "depth", "prompt tokens", "f(T)")
    for k, tree in enumerate(design.trees):
        table.add_row(
            str(k),
            "" if evaluation is None else f"{100 * evaluation.occupancy[k]:.2f} %",
            str(design.pass_tokens[k]),
            str(tree.size(design.tokens_per_prompt_token)),
            str(tree.num_candidates),
            str(tree.depth),
            str(tree.num_prompt_tokens),
            "" if evaluation is None else f"{evaluation.expected_tokens[k]:.4f}",
        )
    print_table(table, console)


def print_assessment(assessment: Assessment, console: Console, always: bool = False) -> None:
    """Print tau, and speedup where known, by each acceptance model at hand; a single one only when asked to."""
    rows: list[tuple[str, float, str, float | None]] = []
    if assessment.independent is not None:
        rows.append(
            ("independent distances", assessment.independent.acceptance_length, "", assessment.independent.speedup)
        )
    if assessment.joint is not None:
        rows.append(("joint counts", assessment.joint.acceptance_length, "", assessment.joint.speedup))
    if assessment.replayed is not None:
        replayed = assessment.replayed
        interval = f"{replayed.low:.4f} to {replayed.high:.4f}"
        rows.append(("replay of recorded text", replayed.acceptance_length, interval, replayed.speedup))
    if len(rows) < 2 and not always:
        return
    with_speed = any(speedup is not None for *_, speedup in rows)
    table = _table("tau by", "tau", "95 % interval", *(("speedup",) if with_speed else ()))
    for name, tau, interval, speedup in rows:
        table.add_row(name, _number(tau), interval, *((_number(speedup, 4),) if with_speed else ()))
    print_table(table, console)


def print_replay_counts(assessment: Assessment, console: Console) -> None:
    """Print the exact counts of a replay."""
    replayed = assessment.replayed
    if replayed is None:
        return
    per_state = ", ".join(f"state {k}: {steps}" for k, steps in enumerate(replayed.steps_per_state))
    console.print(f"replay: {replayed.num_tokens} tokens in {replayed.num_steps} steps ({per_state})")
