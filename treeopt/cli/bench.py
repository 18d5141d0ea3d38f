"""``treeopt bench``."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import (
    AcceptanceModel,
    AsJson,
    Budgets,
    Database,
    Device,
    Dtype,
    Model,
    PromptTokens,
    Raw,
    note,
    one_of,
    parse_budgets,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from rich.table import Table

    from treeopt.app.bench_results import BenchReport, Estimate

__all__ = ["bench", "print_bench"]

Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts", metavar="FILE", help="Text lines, or JSON lines with prompt or turns; some held-out ones without."
    ),
]
Limit = Annotated[int | None, typer.Option("--num-prompts", min=1, help="Take this many prompts of the file.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens to write at most, per prompt.")]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="tau|speed",
        help="Designs with most tokens per step within a budget, or most tokens per second.",
        callback=lambda value: one_of(value, ("tau", "speed")),
    ),
]
Guesses = Annotated[
    str | None,
    typer.Option(
        "--guesses",
        metavar="prompt|free|lookup",
        help="Source of guesses; prompt tokens where there are some.",
        callback=lambda value: value if value is None else one_of(value, ("prompt", "free", "lookup")),
    ),
]
Table_ = Annotated[
    str | None,
    typer.Option("--acceptance", metavar="FILE|NAME", help="Acceptance table of these guesses; the shipped one's."),
]
Ranks = Annotated[
    str | None,
    typer.Option("--ranks", metavar="FILE", help="Rank record for replay and intervals; the table's own if shipped."),
]
Latency = Annotated[
    str,
    typer.Option(
        "--latency",
        metavar="auto|fresh|none|FILE|NAME",
        help="Latency curve: a stored one that fits, else measured now; measured now; none; a file; a stored digest.",
    ),
]
Assistant = Annotated[
    str | None, typer.Option("--assistant", metavar="MODEL", help="Small model for assisted generation as a baseline.")
]
LookupTokens = Annotated[
    int, typer.Option("--lookup-tokens", min=0, help="Candidates of transformers' prompt lookup; 0 leaves it out.")
]
NoLibrary = Annotated[bool, typer.Option("--no-library", help="Leave transformers' own generate out.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Times each prompt is decoded by each contender.")]
Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="dynamic|static",
        help="KV cache that grows, or of fixed shape.",
        callback=lambda value: one_of(value, ("dynamic", "static")),
    ),
]
GraphMode = Annotated[
    str,
    typer.Option(
        "--graph-mode",
        metavar="eager|compiled|cuda_graph",
        help="How passes run; the latter two need --cache static.",
        callback=lambda value: one_of(value, ("eager", "compiled", "cuda_graph")),
    ),
]
Kernels = Annotated[str, typer.Option("--kernels", help="Plan of linear-layer kernels; auto, own, or a plan's name.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write exactly --max-new-tokens.")]
NoStore = Annotated[bool, typer.Option("--no-store", help="Do not keep the runs in the database.")]
Out = Annotated[
    str | None,
    typer.Option("--out", metavar="FILE", help="Write everything to this file, for treeopt plot speedup."),
]


def bench(
    model: Model = "demo",
    prompts: Prompts = None,
    num_prompts: Limit = None,
    max_new_tokens: MaxNewTokens = 64,
    budgets: Budgets = "1,4,8,16",
    objective: Objective = "tau",
    acceptance_model: AcceptanceModel = "independent",
    guesses: Guesses = None,
    prompt_tokens: PromptTokens = None,
    acceptance: Table_ = None,
    ranks: Ranks = None,
    latency: Latency = "auto",
    assistant: Assistant = None,
    lookup_tokens: LookupTokens = 3,
    no_library: NoLibrary = False,
    rounds: Rounds = 1,
    cache: Cache = "dynamic",
    graph_mode: GraphMode = "eager",
    kernels: Kernels = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    raw: Raw = False,
    ignore_eos: IgnoreEos = False,
    out: Out = None,
    no_store: NoStore = False,
    as_json: AsJson = False,
    db: Database = None,
) -> None:
    """Measure designs against plain decoding and against transformers, and compare with what was predicted.

    Example: treeopt bench --model demo --budgets 1,4,8,16 --out bench.json
    """
    wanted = parse_budgets(budgets)
    if graph_mode != "eager" and cache != "static":
        raise typer.BadParameter("needs --cache static", param_hint="--graph-mode")
    if out is not None:
        from treeopt.plot import check_figure_path

        check_figure_path(out)

    from dataclasses import replace

    from treeopt.app.bench import BenchOptions, run_bench
    from treeopt.app.bench_document import baseline_object, budget_object, report_document
    from treeopt.app.bench_inputs import bench_inputs, bench_prompts, load_for_bench, mean_context, store_runs
    from treeopt.app.bench_latency import bench_latency

    options = BenchOptions(
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        objective=objective,
        acceptance_model=acceptance_model,
        cache=cache,
        graph_mode=graph_mode,
        lookup_tokens=lookup_tokens,
        library=not no_library,
        ignore_eos=ignore_eos,
    )
    with progress_bar("bench") as progress:
        loaded = load_for_bench(model, dtype=dtype, device=device, kernels=kernels, progress=progress)
        helper = None
        if assistant is not None:
            helper = load_for_bench(assistant, dtype=dtype, device=device, kernels="own", progress=progress)
        token_ids = bench_prompts(loaded, prompts, limit=num_prompts, raw=raw)
        inputs, basis = bench_inputs(
            loaded, guesses=guesses, prompt_tokens=prompt_tokens, acceptance=acceptance, ranks=ranks
        )
        note(basis)
        profile, line = bench_latency(
            loaded,
            latency,
            wanted,
            mean_context(token_ids, max_new_tokens),
            cache=cache,
            graph_mode=graph_mode,
            db_url=db,
            progress=progress,
        )
        note(line)
        report, timings = run_bench(
            loaded, token_ids, replace(inputs, latency=profile), wanted, options, assistant=helper, progress=progress
        )
    if out is not None:
        from treeopt.artifact import write_text

        write_text(json.dumps(report_document(report), allow_nan=False) + "\n", out)
        note(f"written to {out}; draw it with: treeopt plot speedup {out} --out speedup.svg")
    if as_json:
        for result in report.budgets:
            print_json(budget_object(result))
        for baseline in report.baselines:
            print_json(baseline_object(baseline))
        for finding in report.findings:
            note(finding)
    else:
        print_bench(report)
    if not no_store:  # last: a database that fails takes nothing with it
        note(store_runs(report, timings, db))


def _with_interval(estimate: "Estimate", digits: int = 3) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f}-{estimate.high:.{digits}f})"


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def print_bench(report: "BenchReport") -> None:
    """Print predicted beside measured, the baselines, where the time goes, and what is off."""
    from rich.console import Console

    from treeopt.app.bench_results import Estimate

    console = Console(markup=False)
    console.print(
        f"{report.model} on {report.device}, {report.dtype}, {report.kernels} kernels, {report.cache} cache, "
        f"{report.graph_mode}, context about {report.context_len}: {report.guesses} guesses",
        highlight=False,
    )
    rows = _table("speedup over plain decoding", "budget", "predicted", "measured", "tau", "predicted", "same text")
    for result in report.budgets:
        known = result.prediction
        promised = "-"
        if known is not None and known.speedup is not None:
            promised = _with_interval(Estimate(known.speedup, known.low, known.high))
        rows.add_row(
            str(result.budget),
            promised,
            _with_interval(result.speedup),
            f"{result.acceptance_length.value:.3f}",
            "-" if known is None else f"{known.acceptance_length:.3f}",
            f"{result.identical} of {result.num_prompts}",
        )
    console.print(rows)
    best = max(report.budgets, key=lambda result: result.speedup.value)
    rows = _table("ways to decode", "", "tokens/s", "to plain", f"budget {best.budget} to it", "same text")
    for baseline in report.baselines:
        over = best.over.get(baseline.name)
        name = f"padded to {baseline.pass_tokens}" if baseline.name == "padded" else baseline.name
        rows.add_row(
            name,
            f"{baseline.tokens_per_second:.2f}",
            _with_interval(baseline.speedup),
            "-" if over is None else _with_interval(over),
            f"{baseline.identical} of {baseline.num_prompts}",
        )
    rows.add_row(f"budget {best.budget}", f"{best.tokens_per_second:.2f}", _with_interval(best.speedup), "", "")
    console.print(rows)
    rows = _table("a step, ms", "budget", "all", "forward", "propose", "verify", "commit", "other", "states 0, 1, ..")
    for result in report.budgets:
        split = result.split
        parts = (split.step_s, split.forward_s, split.propose_s, split.verify_s, split.commit_s, split.other_s)
        states = " ".join(f"{share:.0%}" for share in result.occupancy)
        rows.add_row(str(result.budget), *(f"{1e3 * part:.1f}" for part in parts), states)
    console.print(rows)
    for finding in report.findings:
        console.print(f"! {finding}", highlight=False, markup=False)
