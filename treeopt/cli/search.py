"""``treeopt search``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from treeopt.bundled import DEFAULT_TABLE
from treeopt.cli.common import (
    Acceptance,
    AcceptanceModel,
    AsJson,
    Budget,
    Database,
    console,
    note,
    one_of,
    print_json,
    progress_bar,
)

__all__ = ["search"]

SearchLatency = Annotated[
    list[str],
    typer.Option(
        "--latency",
        metavar="auto|none|FILE|NAME",
        help="Latency profile: this device's stored one if there is one, none, a file, or a stored profile's digest. "
        "With one, tokens per second are maximised. Schedules of --target and switching tables take several.",
    ),
]
DEFAULT_LATENCY = ["auto"]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="exact|greedy",
        help="The proven optimum, or the paper's greedy search.",
        callback=lambda value: one_of(value, ("exact", "greedy")),
    ),
]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the tree design to this file.")]
Ranks = Annotated[
    str | None,
    typer.Option("--replay", metavar="RANKS", help="Rank record to judge the design on; the table's own when bundled."),
]


Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="FORMAT",
        help="Search inside another engine's limits and print its own syntax: medusa, eagle, sglang, vllm, .. "
        "(docs/formats.md).",
    ),
]
Context = Annotated[
    int | None, typer.Option("--context", min=0, help="Context length, tokens, that --latency auto should be near to.")
]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Batch size that --latency auto should be near to.")]
Contexts = Annotated[
    str | None,
    typer.Option(
        "--contexts",
        metavar="LIST",
        help="Make a switching table: a small set of designs, and the ranges of context length and batch size where "
        "each is best, as in 128,1024,8192. Every pair must have been profiled.",
    ),
]
Batches = Annotated[
    str | None, typer.Option("--batches", metavar="LIST", help="Batch sizes of a switching table, as in 1,2,4.")
]
MaxDepth = Annotated[int | None, typer.Option("--max-depth", min=1, help="With --target: heads, or most draft steps.")]
DraftSeconds = Annotated[
    float, typer.Option("--draft-s", min=0.0, help="With --target: seconds per level of the engine's draft model.")
]


def search(
    budget: Budget = 64,
    acceptance: Acceptance = DEFAULT_TABLE,
    latency: SearchLatency = DEFAULT_LATENCY,
    context: Context = None,
    batch: Batch = None,
    contexts: Contexts = None,
    batches: Batches = None,
    method: Method = "exact",
    acceptance_model: AcceptanceModel = "independent",
    replay: Ranks = None,
    target: Target = None,
    max_depth: MaxDepth = None,
    draft_s: DraftSeconds = 0.0,
    out: Out = None,
    as_json: AsJson = False,
    db: Database = None,
) -> None:
    """Find the best tree for a model's guesses, a budget and a machine, and prove it.

    Example: treeopt search --acceptance vicuna-7b-m3 --budget 64 --out tree.json
    """
    from treeopt.app.search import bundled_ranks, load_inputs, run_search, search_report
    from treeopt.artifact import read_document, to_document, write_document
    from treeopt.types import RankRecord

    if contexts is not None or batches is not None:
        from treeopt.cli.switch import parse_numbers, search_switch_table

        _refuse_beside("--contexts and --batches", target=target, replay=replay, max_depth=max_depth, draft_s=draft_s)
        wanted_batches = parse_numbers(str(batch or 1) if batches is None else batches, "--batches")
        wanted_contexts = parse_numbers(str(context or 512) if contexts is None else contexts, "--contexts")
        search_switch_table(
            acceptance, latency, budget, wanted_batches, wanted_contexts, method, acceptance_model, out, as_json, db
        )
        return
    if target is not None:
        _refuse_beside("--target", method=method != "exact", replay=replay, json=as_json)
        profiles = _Profiles(tuple(latency), context, batch, db)
        _search_for_target(target, acceptance, profiles, budget, acceptance_model, max_depth, draft_s, out)
        return
    if max_depth is not None or draft_s:
        raise typer.BadParameter("goes with --target only", param_hint="--max-depth" if max_depth else "--draft-s")
    if len(latency) > 1:
        raise typer.BadParameter(
            "takes one profile; only the schedules of --target take several", param_hint="--latency"
        )
    record = bundled_ranks(acceptance) if replay is None else read_document(replay, RankRecord)
    inputs, line = load_inputs(acceptance, latency[0], context_len=context, batch_size=batch, db_url=db)
    with progress_bar("search") as progress:
        design = run_search(inputs, budget, method, acceptance_model, progress)
        report = None if as_json else search_report(inputs, design, record, progress, record_name=replay)
    if out is not None:
        write_document(design, out)
    if line is not None:
        note(line)  # only now: where something fails, its reason stands alone
    if report is None:
        print_json(to_document(design))
        return
    from treeopt.cli.report import print_search

    print_search(report, inputs, console())
    if out is not None:
        note(f"written to {out}; draw it with: treeopt show {out}")


def _refuse_beside(flags: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(f"does not go with {flags}", param_hint="--" + name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class _Profiles:
    """Which latency profiles were asked for."""

    names: tuple[str, ...]
    context_len: int | None
    batch_size: int | None
    db_url: str | None


def _search_for_target(
    target: str,
    acceptance: str,
    wanted: _Profiles,
    budget: int,
    acceptance_model: str,
    max_depth: int | None,
    draft_s: float,
    out: str | None,
) -> None:
    from treeopt.app.search import load_inputs
    from treeopt.app.target import TARGETS, search_for_target
    from treeopt.cli.convert import deliver

    if target not in TARGETS:
        raise typer.BadParameter(f"must be one of {', '.join(TARGETS)}, not {target!r}", param_hint="--target")
    profiles, lines = [], []
    for name in wanted.names:
        inputs, line = load_inputs(
            acceptance, name, context_len=wanted.context_len, batch_size=wanted.batch_size, db_url=wanted.db_url
        )
        if line is not None:
            lines.append(line)
        if inputs.latency is not None:
            profiles.append(inputs.latency)
    with progress_bar("search") as progress:
        result = search_for_target(
            target,
            inputs.table,
            budget,
            profiles,
            acceptance_model=acceptance_model,
            max_depth=max_depth,
            draft_s=draft_s,
            progress=progress,
        )
    deliver(result.content, out)
    for text in (*lines, *result.notes):
        note(text)
