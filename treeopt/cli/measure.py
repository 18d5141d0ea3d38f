"""``treeopt measure``."""

from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import AsJson, Device, Dtype, Model, Raw, Seed, note, print_json, progress_bar

if TYPE_CHECKING:
    from treeopt.types import AcceptanceTable

__all__ = ["measure"]

PromptTokens = Annotated[
    str | None,
    typer.Option(
        "--prompt-tokens",
        metavar="FOLDER|free",
        help="Trained prompt tokens; free for untrained ones; default: shipped.",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts", metavar="FILE", help="Text lines, or JSON lines with prompt or turns; shipped ones without it."
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens the model writes per prompt.")]
MaxRank = Annotated[int, typer.Option("--max-rank", min=1, max=1000, help="Ranks that are told apart.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy; above 0 samples.")]
TypicalFlag = Annotated[bool, typer.Option("--typical", help="Record typical acceptance; needs a temperature.")]
Out = Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the acceptance table to this file.")]
Ranks = Annotated[str | None, typer.Option("--ranks", metavar="FILE", help="Write the rank record, for replay.")]
Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw accumulative accuracy: .png, .svg or .pdf.")
]
Compare = Annotated[
    list[str] | None,
    typer.Option("--compare", metavar="FILE|NAME", help="Draw this table beside it; may be given again."),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts answered together.")]


def measure(
    model: Model = "demo",
    prompt_tokens: PromptTokens = None,
    prompts: Prompts = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 128,
    max_rank: MaxRank = 10,
    temperature: Temperature = 0.0,
    typical: TypicalFlag = False,
    out: Out = None,
    ranks: Ranks = None,
    plot: Plot = None,
    compare: Compare = None,
    batch_size: Batch = 16,
    dtype: Dtype = "float32",
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how often each guess is right: the model answers prompts, and every true token is ranked.

    Example: treeopt measure --model demo --prompts prompts.txt --out acceptance.json --ranks ranks.json
    """
    if typical and temperature == 0:
        raise typer.BadParameter("needs --temperature above 0", param_hint="--typical")
    if compare and plot is None:
        raise typer.BadParameter("needs --plot FILE to draw to", param_hint="--compare")
    if plot is not None and not plot.lower().endswith((".png", ".svg", ".pdf")):
        raise typer.BadParameter(f"must end in .png, .svg or .pdf, not {plot!r}", param_hint="--plot")

    from treeopt.app.measure import accuracy_figure, choose_prompt_tokens
    from treeopt.app.measure import measure as run
    from treeopt.app.runtime import Typical, load_model, read_prompts
    from treeopt.app.texts import answers_to, shipped_prompts, source_line
    from treeopt.artifact import to_document, write_document
    from treeopt.bundled import load_acceptance
    from treeopt.plot import check_figure_path, save_figure

    if plot is not None:
        check_figure_path(plot)
    others = [(name, load_acceptance(name)[0]) for name in compare or []]
    path = prompts or shipped_prompts("prompts-held-out.jsonl")
    wanted = read_prompts(path)
    with progress_bar("loading") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=lambda text, share: progress(text))
    tokens = choose_prompt_tokens(loaded, prompt_tokens)
    with progress_bar("measuring") as progress:
        texts = answers_to(
            loaded,
            wanted,
            max_new_tokens=max_new_tokens,
            raw=raw,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
        )
        found = run(
            loaded,
            tokens,
            texts,
            source=source_line(path, texts, max_new_tokens=max_new_tokens, raw=raw, dtype=dtype),
            max_rank=max_rank,
            temperature=temperature,
            typical=Typical() if typical else None,
            seed=seed,
            progress=progress,
        )
    if out is not None:
        write_document(found.table, out)
    if ranks is not None:
        write_document(found.record, ranks)
    if plot is not None:
        save_figure(accuracy_figure([("measured", found.table), *others]), plot)
    if as_json:
        print_json(to_document(found.table))
        return
    _print_table(found.table)
    if out is not None:
        note(f"written to {out}; find a tree with: treeopt search --acceptance {out}")


def _print_table(table: "AcceptanceTable") -> None:
    from itertools import accumulate

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from treeopt.app.measure import cumulative_intervals

    console = Console(markup=False)
    console.print(f"{table.model}: {table.num_samples:,} positions, {table.rule}", highlight=False)
    tops = [k for k in (1, 2, 3, 5, 10, 20, 50, 100) if k <= table.num_ranks]
    shown = Table(box=SIMPLE, pad_edge=False)
    for name in ("accuracy", *(f"top {k}" for k in tops)):
        shown.add_column(name, justify="right")
    intervals = cumulative_intervals(table)
    for j, row in enumerate(table.marginals):
        shares = list(accumulate(row))
        cells = [f"{shares[k - 1]:.3f}" for k in tops]
        if intervals is not None:
            halves = [(intervals[j][k - 1][2] - intervals[j][k - 1][1]) / 2 for k in tops]
            cells = [f"{cell} ± {half:.3f}" for cell, half in zip(cells, halves, strict=True)]
        shown.add_row(f"distance {j + 1}", *cells)
    console.print(shown)
