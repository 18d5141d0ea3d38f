"""``treeopt generate``."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treeopt.cli.common import (
    AsJson,
    Device,
    Dtype,
    Model,
    PromptTokens,
    Raw,
    Seed,
    note,
    one_of,
    print_json,
    progress_bar,
)
from treeopt.types import MAX_BUDGET

if TYPE_CHECKING:
    from treeopt.app.generate import Stats
    from treeopt.app.runtime import Generation

__all__ = ["generate"]

Prompt = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="What to answer.", show_default=False)]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="FILE|none",
        help="Tree design or switching table; none decodes plainly; without it one is chosen.",
    ),
]
Guesses = Annotated[
    str | None,
    typer.Option(
        "--guesses",
        metavar="prompt|free|lookup",
        help="Trained prompt tokens, the model's own embeddings, or n-grams of the text.",
        callback=lambda value: value if value is None else one_of(value, ("prompt", "free", "lookup")),
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts", metavar="FILE", help="Text lines, or JSON lines with prompt or turns (the first turn is taken)."
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy; above 0 samples exactly.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample among this many tokens; 0 for all.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample among this share; 1 for all.")]
TypicalFlag = Annotated[
    bool, typer.Option("--typical", help="Typical acceptance: faster, but not the model's distribution.")
]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends a text; may be given again.")]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the passes, in a minute or two per pass size once (kept on disk); uses a cache of fixed shape.",
    ),
]
CacheKind = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="dynamic|static|graph",
        help="KV cache that grows, of fixed shape, or replayed as CUDA graphs.",
        callback=lambda value: one_of(value, ("dynamic", "static", "graph")),
    ),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts decoded together.")]
DefaultBudget = Annotated[
    int | None,
    typer.Option(
        "--budget", min=1, max=MAX_BUDGET, help="Tokens per pass of the tree that is chosen.", show_default=False
    ),
]
WithStats = Annotated[bool, typer.Option("--stats", help="Say what decoding took, on stderr (with --json, per line).")]


def generate(
    prompt: Prompt = None,
    model: Model = "demo",
    tree: Tree = None,
    guesses: Guesses = None,
    prompt_tokens: PromptTokens = None,
    prompts: Prompts = None,
    raw: Raw = False,
    max_new_tokens: MaxNewTokens = 128,
    dtype: Dtype = "float32",
    device: Device = "auto",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    typical: TypicalFlag = False,
    stop: Stop = None,
    cache: CacheKind = "dynamic",
    compiled: Compiled = False,
    batch_size: Batch = 1,
    budget: DefaultBudget = None,
    stats: WithStats = False,
    as_json: AsJson = False,
) -> None:
    """Answer prompts with a tree: the same text as plain decoding, in fewer passes.

    Example: treeopt generate --model demo --stats "Name three colours."
    """
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts FILE", param_hint="PROMPT")
    if typical and temperature == 0:
        raise typer.BadParameter("needs --temperature above 0", param_hint="--typical")
    if compiled and cache == "graph":
        raise typer.BadParameter("does not go with --cache graph", param_hint="--compile")
    if temperature == 0 and (top_k or top_p < 1):
        raise typer.BadParameter("needs --temperature above 0", param_hint="--top-k" if top_k else "--top-p")
    if tree is not None and budget is not None:
        raise typer.BadParameter("is for a tree that is searched, not beside --tree", param_hint="--budget")
    if tree == "none" and (guesses is not None or prompt_tokens is not None):
        flag = "--guesses" if guesses is not None else "--prompt-tokens"
        raise typer.BadParameter("does nothing with --tree none", param_hint=flag)
    if prompt_tokens is not None and guesses in ("free", "lookup"):
        raise typer.BadParameter("goes with --guesses prompt only", param_hint="--prompt-tokens")
    if top_p == 0:
        raise typer.BadParameter("must be above 0", param_hint="--top-p")

    from treeopt.app.generate import plan_decoding, statistics, stream_prompts
    from treeopt.app.runtime import Settings, Typical, load_model, read_prompts

    texts = read_prompts(prompts) if prompts is not None else [prompt or ""]
    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        typical=Typical() if typical else None,
        stop=tuple(stop or ()),
        cache="compiled" if compiled else cache,
    )
    with progress_bar("loading") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=lambda text, share: progress(text))
    plan = plan_decoding(loaded, tree=tree, guesses=guesses, prompt_tokens=prompt_tokens, budget=budget)
    if typical:
        note("typical acceptance: the text does not follow the model's distribution exactly")

    done = {}
    for piece in stream_prompts(loaded, texts, plan, settings, batch_size=batch_size, raw=raw):
        if not as_json and batch_size == 1:
            _show(piece.text, end=piece.generation is not None)
        if piece.generation is not None:
            done[piece.index] = piece.generation
            if as_json and batch_size == 1:
                print_json(_document(piece.generation, stats))
    generations = [done[index] for index in range(len(texts))]
    if batch_size > 1:
        for generation in generations:
            print_json(_document(generation, stats)) if as_json else _show(generation.text or "", end=True)
    if stats and not as_json:
        _print_stats(statistics([each.run for each in generations], plan.design, batch_size=batch_size))


def _show(text: str, *, end: bool) -> None:
    sys.stdout.write(text + ("\n" if end else ""))
    sys.stdout.flush()


def _document(generation: "Generation", with_stats: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "prompt_token_ids": list(generation.prompt_token_ids),
        "token_ids": list(generation.token_ids),
        "text": generation.text,
        "num_steps": generation.run.num_steps,
        "seconds": generation.seconds,
        "finish_reason": generation.finish_reason,
    }
    if with_stats:
        from treeopt.artifact import to_document

        document["run"] = to_document(generation.run)
    return document


def _print_stats(stats: "Stats") -> None:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    outside = 1 - stats.forward_s / stats.decode_s if stats.decode_s else None
    occupancy = "  ".join(f"{k}: {share:.1%}" for k, share in enumerate(stats.occupancy))
    for name, value in (
        ("texts", str(stats.num_texts)),
        ("steps", str(stats.num_steps)),
        ("tokens", str(stats.num_new_tokens)),
        ("tokens per step", f"{figure(stats.tokens_per_step)} (expected {figure(stats.expected_tokens_per_step)})"),
        ("tokens per second", figure(stats.tokens_per_second)),
        ("state occupancy", occupancy or "-"),
        ("prefill", f"{stats.prefill_s:.3f} s"),
        ("decoding", f"{stats.decode_s:.3f} s ({figure(outside)} of it outside the model's forward)"),
    ):
        note(f"{name:<18} {value}")
