"""``treeopt profile``: measure this machine's step latencies, keep them, share them."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeopt.cli.common import Database, note, print_json

if TYPE_CHECKING:
    from treeopt.app.profile_request import ProfileRequest

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure the step latency of a model on this machine, keep the curves and share them.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else on stdout.")]
Reference = Annotated[str, typer.Argument(metavar="DIGEST", help="Digest of a profile, or its first digits.")]
Model = Annotated[str, typer.Option("--model", help="Model: hub id, folder, GGUF file, or demo.")]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="config.json to build the model from, with random weights."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="LIST", help="Input lengths, as 1,2,4,8 or 1-64. Default: coarse to fine."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Largest input length, without --tokens.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0, help="Time to refine each curve, without --tokens.")]
Contexts = Annotated[str, typer.Option("--contexts", metavar="LIST", help="Tokens in the cache before the step.")]
Batches = Annotated[str, typer.Option("--batch-sizes", metavar="LIST", help="Rows decoded together.")]
Dtypes = Annotated[str, typer.Option("--dtype", metavar="LIST", help="Number formats: float32, bfloat16, float16.")]
Attentions = Annotated[
    str,
    typer.Option("--attention", metavar="LIST", help="Attention backends: auto, sdpa, eager."),
]
Caches = Annotated[str, typer.Option("--cache", metavar="LIST", help="KV caches: dynamic, static.")]
GraphModes = Annotated[
    str, typer.Option("--graph-mode", metavar="LIST", help="eager, compiled or cuda_graph (both need --cache static).")
]
Kernels = Annotated[str, typer.Option("--kernels", help="Plan of linear-layer kernels, as the runtime takes it.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, mps, cuda or cuda:N.")]
NoForward = Annotated[bool, typer.Option("--no-forward", help="Do not time the bare forward pass beside the step.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure anew instead of taking up or refining a recent curve.")]


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    """Read ``1,2,4-8`` as whole numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if not match:
            raise typer.BadParameter(f"{part!r} is no whole number or range", param_hint=flag)
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first:
            raise typer.BadParameter(f"{part!r} runs backwards", param_hint=flag)
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _request(options: Mapping[str, Any]) -> "ProfileRequest":
    from treeopt.app.profile_request import ProfileRequest

    return ProfileRequest(
        model=options["model"],
        config=options["config"],
        tokens=None if options["tokens"] is None else _numbers(options["tokens"], "--tokens"),
        max_tokens=options["max_tokens"],
        seconds=options["seconds"],
        contexts=_numbers(options["contexts"], "--contexts"),
        batch_sizes=_numbers(options["batch_sizes"], "--batch-sizes"),
        dtypes=_words(options["dtype"]),
        attentions=_words(options["attention"]),
        caches=_words(options["cache"]),
        graph_modes=_words(options["graph_mode"]),
        kernels=options["kernels"],
        device=options["device"],
        forward=not options["no_forward"],
        fresh=options["fresh"],
    )


def _lines(rows: Iterable[tuple[object, ...]], titles: tuple[str, ...]) -> None:
    """Print an aligned table."""
    table = [titles, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    for row in table:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("run")
def run(
    model: Model = "demo",
    config: Config = None,
    tokens: Tokens = None,
    max_tokens: MaxTokens = 64,
    seconds: Seconds = 60.0,
    contexts: Contexts = "512",
    batch_sizes: Batches = "1",
    dtype: Dtypes = "float32",
    attention: Attentions = "auto",
    cache: Caches = "dynamic",
    graph_mode: GraphModes = "eager",
    kernels: Kernels = "auto",
    device: Device = "auto",
    no_forward: NoForward = False,
    fresh: Fresh = False,
    precision: Annotated[
        float, typer.Option("--precision", help="Half the 95 % interval of a median, as a share of it.")
    ] = 0.03,
    point_seconds: Annotated[
        float, typer.Option("--point-seconds", min=0, help="Longest time of the timed steps of one point.")
    ] = 3.0,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for another measurement.")] = 0.0,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's latency curves now: whole decoding steps, the bare forward pass beside them.

    Every point is stored as soon as it is measured; after an interruption the same command goes on where it stopped.

    Example: treeopt profile run --model demo --contexts 64,512
    """
    request = _request(locals())
    from treeopt.app.profile import Hooks, run_profiles, search_choice
    from treeopt.app.profile_library import open_for_writing
    from treeopt.app.profile_report import outcome_lines, progress_line, stopping_rule

    rule = stopping_rule(precision, point_seconds)
    engine = open_for_writing(db)
    hooks = Hooks(on_point=progress_line(note), chosen=search_choice("vicuna-7b-m3"))
    for outcome in run_profiles(engine, request, hooks=hooks, rule=rule, lock_timeout_s=wait):
        typer.echo(outcome_lines(outcome, as_json=as_json))


@app.command("list")
def list_command(
    model: Annotated[str | None, typer.Option("--model", help="Only this model's.")] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the profiles, newest first.

    Example: treeopt profile list --model demo
    """
    from datetime import UTC, datetime

    from treeopt.app.profile_library import open_for_reading, stored, summary

    now = datetime.now(UTC)
    rows = [summary(profile, now) for profile in stored(open_for_reading(db), model=model)]
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        note("no profiles yet; measure one with treeopt profile run")
        return
    _lines(
        (
            (
                (row["digest"] or "-")[:12],
                row["model"],
                row["device"],
                row["dtype"],
                row["batch_size"],
                row["context_len"],
                f"{row['graph_mode']}/{row['cache']}",
                f"{row['num_points']}/{len(row['grid'])}",
                "yes" if row["complete"] else "no",
                ",".join(row["flags"]) or "-",
                _age(row["age_s"]),
            )
            for row in rows
        ),
        ("digest", "model", "device", "dtype", "batch", "context", "mode", "points", "complete", "flags", "age"),
    )


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command("show")
def show(reference: Reference, db: Database = None, as_json: AsJson = False) -> None:
    """Show one profile point by point: median, spread, the bare forward pass, flags.

    Example: treeopt profile show 3f2a9c
    """
    from datetime import UTC, datetime

    from treeopt.app.profile_library import found, open_for_reading, point_rows, summary

    profile = found(open_for_reading(db), reference)
    facts = summary(profile, datetime.now(UTC))
    if as_json:
        print_json({**facts, "points": point_rows(profile)})
        return
    for name, value in facts.items():
        typer.echo(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    typer.echo("")
    rows = (
        (
            row["num_tokens"],
            f"{1e3 * row['median_s']:.3f}",
            f"{1e3 * (row['iqr_s'] or 0):.3f}",
            row["num_samples"] or "-",
            "-" if row["forward_s"] is None else f"{1e3 * row['forward_s']:.3f}",
            "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            ",".join(row["flags"]) or ("" if row["settled"] else "not settled"),
        )
        for row in point_rows(profile)
    )
    _lines(rows, ("tokens", "median ms", "iqr ms", "samples", "forward ms", "L(n)/L(1)", "flags"))


@app.command("export")
def export(
    reference: Reference,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default stdout.")] = None,
    db: Database = None,
) -> None:
    """Write a profile as a treeopt.latency document that others can verify and import.

    Example: treeopt profile export 3f2a9c --out latency.json
    """
    from treeopt.app.profile_library import export_profile, open_for_reading

    text = export_profile(open_for_reading(db), reference, out)
    if out is None:
        typer.echo(text, nl=False)
    else:
        note(f"wrote {out}")


@app.command("import")
def import_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="treeopt.latency documents with sha256.")],
    db: Database = None,
) -> None:
    """Store profiles that were exported elsewhere; what cannot be verified is refused.

    Example: treeopt profile import latency.json
    """
    from treeopt.app.profile_library import import_profile, open_for_writing

    engine = open_for_writing(db)
    for file in files:
        profile = import_profile(engine, file)
        typer.echo(f"{profile.digest}  {profile.conditions.model} on {profile.conditions.device.get('name')}")


@app.command("compare")
def compare(
    first: Reference,
    second: Annotated[str, typer.Argument(metavar="DIGEST", help="The other profile.")],
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Compare two profiles where both were measured: latencies, and how far their shapes L(n)/L(1) differ.

    Example: treeopt profile compare 3f2a9c 81b04d
    """
    from treeopt.app.profile_library import compare as compare_profiles
    from treeopt.app.profile_library import open_for_reading

    _, _, ratios = compare_profiles(open_for_reading(db), first, second)
    if as_json:
        for ratio in ratios:
            print_json(asdict(ratio))
        return
    _lines(
        (
            (
                r.num_tokens,
                f"{1e3 * r.first_s:.3f}",
                f"{1e3 * r.second_s:.3f}",
                f"{r.second_s / r.first_s:.3f}",
                f"{100 * r.relative:+.1f} %",
            )
            for r in ratios
        ),
        ("tokens", "first ms", "second ms", "ratio", "L(n)/L(1) differs by"),
    )
    close = sum(abs(r.relative) <= 0.1 for r in ratios)
    note(f"L(n)/L(1) agrees within 10 % at {close} of {len(ratios)} points")


@app.command("plot")
def plot(
    references: Annotated[list[str], typer.Argument(metavar="DIGEST...", help="Profiles to draw, one line each.")],
    out: Annotated[Path, typer.Option("--out", help="Picture to write: .svg, .png or .pdf.")] = Path("latency.svg"),
    db: Database = None,
) -> None:
    """Draw latency curves with their quartiles.

    Example: treeopt profile plot 3f2a9c 81b04d --out curves.png
    """
    from treeopt.app.profile_library import open_for_reading, plot_profiles

    plot_profiles(open_for_reading(db), references, out)
    note(f"wrote {out}")


@app.command("forget")
def forget(reference: Reference, db: Database = None) -> None:
    """Delete a profile and its points.

    Example: treeopt profile forget 3f2a9c
    """
    from treeopt.app.profile_library import forget as forget_profile
    from treeopt.app.profile_library import open_for_reading

    profile = forget_profile(open_for_reading(db), reference)
    note(f"forgot {profile.digest}")


@app.command("schedule")
def schedule(
    model: Model = "demo",
    config: Config = None,
    tokens: Tokens = None,
    max_tokens: MaxTokens = 64,
    seconds: Seconds = 60.0,
    contexts: Contexts = "512",
    batch_sizes: Batches = "1",
    dtype: Dtypes = "float32",
    attention: Attentions = "auto",
    cache: Caches = "dynamic",
    graph_mode: GraphModes = "eager",
    kernels: Kernels = "auto",
    device: Device = "auto",
    no_forward: NoForward = False,
    window: Annotated[
        str | None, typer.Option("--window", metavar="HH:MM-HH:MM", help="Hours in which it may run, local time.")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="Larger first.")] = 0,
    max_age: Annotated[
        float | None,
        typer.Option("--max-age", metavar="DAYS", help="Measure again when older, or driver or model changed."),
    ] = None,
    attempts: Annotated[int, typer.Option("--attempts", min=1, help="Failures allowed in a row.")] = 3,
    db: Database = None,
) -> None:
    """Queue a measurement of this machine's device for when it is idle (see watch).

    Example: treeopt profile schedule --model demo --window 22:00-06:00
    """
    request = _request({**locals(), "fresh": False})
    if max_age is not None and not max_age > 0:
        raise typer.BadParameter("must be above 0, else it would be due for ever", param_hint="--max-age")
    from treeopt.app.profile_library import open_for_writing
    from treeopt.app.watch_schedule import schedule as schedule_request

    job = schedule_request(
        open_for_writing(db),
        request,
        hours=window,
        priority=priority,
        max_age_s=None if max_age is None else max_age * 86_400,
        max_attempts=attempts,
    )
    typer.echo(f"job {job.id}: {job.state}; treeopt profile watch measures it when the machine is idle")


@app.command("jobs")
def jobs_command(
    cancel: Annotated[int | None, typer.Option("--cancel", metavar="JOB", help="Take this job out.")] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the queue, or take a job out of it.

    Example: treeopt profile jobs
    """
    from treeopt.app.profile_library import open_for_reading, open_for_writing
    from treeopt.app.watch_schedule import cancel as cancel_job
    from treeopt.app.watch_schedule import job_summary, queue

    if cancel is not None:
        cancel_job(open_for_writing(db), cancel)
        note(f"job {cancel}: cancelled")
        return
    rows = [job_summary(job) for job in queue(open_for_reading(db))]
    if as_json:
        for row in rows:
            print_json(row)
    elif rows:
        titles = ("id", "state", "priority", "model", "attempts", "not_before", "last_error")
        _lines((tuple("-" if row[t] is None else row[t] for t in titles) for row in rows), titles)
    else:
        note("no jobs; queue one with treeopt profile schedule")


@app.command("watch")
def watch(
    once: Annotated[
        bool, typer.Option("--once", help="Work until nothing is due or the machine is busy, then end.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between looks at the machine.")] = 30.0,
    dwell: Annotated[float, typer.Option("--dwell", min=0, help="Seconds the machine must have been idle.")] = 60.0,
    wait: Annotated[
        float | None,
        typer.Option("--wait", min=0, help="With --once: seconds to wait for idleness. Default: twice the dwell."),
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="HH:MM-HH:MM", help="Hours in which to work, local time.")
    ] = None,
    max_cpu: Annotated[
        float, typer.Option("--max-cpu", min=0, max=1, help="Share of the processors others may use.")
    ] = 0.25,
    on_battery: Annotated[bool, typer.Option("--on-battery", help="Work on battery too.")] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Take what the device cannot tell (utilisation under MIG) as idle.")
    ] = False,
    device: Device = "auto",
    db: Database = None,
) -> None:
    """Measure queued profiles whenever the machine is idle; give way when it is not.

    Example: treeopt profile watch --once
    """
    from treeopt.app.profile_library import open_for_writing
    from treeopt.app.watch import Machine, Watcher, run_daemon, run_once
    from treeopt.app.watch_schedule import idle_policy

    policy = idle_policy(
        max_foreign_cpu=max_cpu, need_mains=not on_battery, allow_unknown=allow_unknown, window=window, dwell_s=dwell
    )
    watcher = Watcher(open_for_writing(db), Machine.this(device), policy, say=note)
    if once:
        run_once(watcher, wait_s=2 * dwell if wait is None else wait)
    else:
        run_daemon(watcher, every_s=every)
