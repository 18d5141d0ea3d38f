"""``treeopt train``."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import AsJson, Device, Model, Seed, note, one_of, print_json, progress_bar

if TYPE_CHECKING:
    from treeopt.app.train import TrainingReport

__all__ = ["train"]

Out = Annotated[
    str, typer.Option("--out", metavar="FOLDER", help="Where prompt tokens, log and checkpoints go; go on from there.")
]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts whose answers to train on; the shipped ones without it."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="FILE", help="Train on these texts as they stand: text, JSON lines with text, or ShareGPT."
    ),
]
HeldOut = Annotated[
    str | None, typer.Option("--held-out", metavar="FILE", help="Prompts to evaluate on; the shipped ones without it.")
]
Distances = Annotated[int, typer.Option("--distances", min=1, max=8, help="Prompt tokens, m.")]
Epts = Annotated[int, typer.Option("--epts", min=1, help="Ensemble prompt tokens per prompt token.")]
Mask = Annotated[
    str,
    typer.Option(
        "--mask",
        metavar="ensemble|decoder|encoder",
        help="How ensemble prompt tokens see each other.",
        callback=lambda value: one_of(value, ("ensemble", "decoder", "encoder")),
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps of the optimiser.")]
TextsPerStep = Annotated[int, typer.Option("--texts-per-step", min=1, help="Texts per step.")]
Groups = Annotated[int, typer.Option("--groups", min=1, help="Places per text where prompt tokens are inserted.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="Highest learning rate of Adam.")]
Decay = Annotated[float, typer.Option("--decay", help="Weight of each distance against the one before it.")]
Loss = Annotated[
    str,
    typer.Option(
        "--loss",
        metavar="distillation|labels",
        help="Learn the model's predictions, or the tokens of the text.",
        callback=lambda value: one_of(value, ("distillation", "labels")),
    ),
]
Insertion = Annotated[
    str,
    typer.Option(
        "--insertion",
        metavar="random|end",
        help="Insert at random places, or at the end of each text.",
        callback=lambda value: one_of(value, ("random", "end")),
    ),
]
Start = Annotated[
    str,
    typer.Option(
        "--start",
        metavar="vocabulary|text|random|FOLDER",
        help="What the embeddings start from; a folder of prompt tokens is trained further.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Longest answer to train on.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="Sample the answers; 0 is greedy.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="float32|bfloat16",
        help="Number format of the frozen model; prompt tokens are always float32.",
        callback=lambda value: one_of(value, ("float32", "bfloat16")),
    ),
]
SaveEvery = Annotated[int, typer.Option("--save-every", min=1, help="Steps between checkpoints.")]
EvaluateEvery = Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")]
Push = Annotated[
    str | None, typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Upload the result to the Hugging Face Hub.")
]


def train(
    out: Out,
    model: Model = "demo",
    prompts: Prompts = None,
    data: Data = None,
    held_out: HeldOut = None,
    distances: Distances = 3,
    epts: Epts = 1,
    mask: Mask = "ensemble",
    steps: Steps = 800,
    texts_per_step: TextsPerStep = 1,
    groups: Groups = 96,
    learning_rate: Rate = 0.02,
    decay: Decay = 0.8,
    loss: Loss = "distillation",
    insertion: Insertion = "random",
    start: Start = "vocabulary",
    max_new_tokens: MaxNewTokens = 192,
    temperature: Temperature = 0.0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    seed: Seed = 0,
    save_every: SaveEvery = 20,
    evaluate_every: EvaluateEvery = 200,
    push_to_hub: Push = None,
    as_json: AsJson = False,
) -> None:
    """Train prompt tokens for a model: its weights stay as they are, a few embeddings learn.

    Interrupted, the same command goes on from its last checkpoint.

    Example: treeopt train --model demo --dtype bfloat16 --out prompt-tokens
    """
    if prompts is not None and data is not None:
        raise typer.BadParameter("give either --prompts or --data", param_hint="--data")
    if data is not None and temperature > 0:
        raise typer.BadParameter("samples answers to prompts; the texts of --data stand", param_hint="--temperature")

    from treeopt.app.runtime import (
        TrainingPlan,
        check_base_model,
        embedding_size,
        load_model,
        load_prompt_tokens,
        push_prompt_tokens,
    )
    from treeopt.app.texts import held_out_texts, training_texts
    from treeopt.app.train import crew, train_prompt_tokens

    given = None if start in ("vocabulary", "text", "random") else load_prompt_tokens(start)
    plan = TrainingPlan(
        num_distances=distances,
        num_epts=epts,
        mask=mask,
        num_steps=steps,
        texts_per_step=texts_per_step,
        groups_per_text=groups,
        learning_rate=learning_rate,
        decay=decay,
        loss=loss,
        insertion=insertion,
        start=start if given is None else "given",
        seed=seed,
    )
    team = crew(device)
    with progress_bar("loading") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=lambda text, share: progress(text))
    if given is not None:
        check_base_model(
            given, hidden_size=embedding_size(loaded.model), base_model=loaded.name, base_digest=loaded.digest
        )
    with team.first_goes_first(), progress_bar("answering") as progress:
        texts = training_texts(
            loaded,
            prompts=prompts,
            data=data,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            progress=progress,
        )
        judged = held_out_texts(loaded, held_out, max_new_tokens=max_new_tokens, progress=progress)
    with progress_bar("training", total=steps) as progress:

        def show(entry: dict[str, object]) -> None:
            if as_json:
                print_json(entry)
            if entry["event"] == "step":
                progress(f"step {entry['step']} of {steps}, loss {entry['loss']:.3f}")

        report = train_prompt_tokens(
            loaded,
            plan,
            texts,
            out,
            given=given,
            held_out=judged,
            record={"command": shlex.join(["treeopt", *sys.argv[1:]])},
            save_every=save_every,
            evaluate_every=evaluate_every,
            team=team,
            report=show,
        )
    if push_to_hub is not None and team.rank == 0:
        note(f"published at {push_prompt_tokens(out, push_to_hub)}")
    if as_json or team.rank > 0:
        return
    _print_report(report, out)


def _print_report(report: "TrainingReport", out: str) -> None:
    """Say what the run came to, in the paper's terms: share of parameters, time, memory."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    share, memory = report.num_trainable / report.num_model, report.num_bytes / report.num_model_bytes
    console.print(
        f"{report.num_trainable:,} parameters learnt ({share:.4%} of the model's {report.num_model:,}), "
        f"{report.num_bytes:,} bytes ({memory:.4%} of its memory)",
        highlight=False,
    )
    console.print(f"{len(report.losses)} steps in {report.train_s:.0f} s", highlight=False)
    if report.top is not None:
        from treeopt.app.train import TOPS

        table = Table(box=SIMPLE, pad_edge=False)
        for name in ("held-out accuracy", *(f"top {k}" for k in TOPS)):
            table.add_column(name, justify="right")
        for j, row in enumerate(report.top, 1):
            table.add_row(f"distance {j}", *(f"{share:.3f}" for share in row))
        console.print(table)
    console.print(f"written to {out}; measure with: treeopt measure --prompt-tokens {out}", highlight=False)
