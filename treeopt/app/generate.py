"""Use case: decode prompts with a tree, and say what the tree was worth."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from ppd_runtime import GuessSource, LoadedModel, PromptTokens, Settings, TextPiece, guess_source, load_prompt_tokens
from ppd_runtime import stream as stream_batch
from treeopt.artifact import from_document, read_json
from treeopt.bundled import load_acceptance
from treeopt.errors import DocumentError
from treeopt.search import search
from treeopt.types import AcceptanceTable, DecodeRun, SwitchTable, TreeDesign

__all__ = ["Plan", "Stats", "default_budget", "plan_decoding", "statistics", "stream_prompts"]

SHIPPED = {"demo": "smollm2-135m-instruct-m3"}
"""Model name -> name of its prompt tokens in ``ppd_runtime/data`` and of their acceptance table in ``treeopt/data``."""

ROUGH_MARGINALS = {
    # Orders of magnitude, for a first tree where nothing was measured; `treeopt measure` gives real ones.
    "prompt": ((0.25, 0.09, 0.05, 0.04, 0.03), (0.13, 0.06, 0.04, 0.03, 0.02), (0.10, 0.05, 0.03, 0.02, 0.02)),
    "free": ((0.15, 0.07, 0.05, 0.03, 0.02), (0.08, 0.04, 0.03, 0.02, 0.02), (0.05, 0.03, 0.02, 0.02, 0.01)),
    "lookup": ((0.30, 0.07, 0.03), (0.55, 0.05, 0.02), (0.65, 0.04, 0.02)),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What decodes: a design, or several to switch between, and its source of guesses; both None for plain decoding."""

    design: TreeDesign | SwitchTable | None
    source: GuessSource | None


def default_budget(loaded: LoadedModel) -> int:
    """Return a budget for a tree nobody asked for: a CPU pays for every token of a pass, a GPU for few of the first."""
    return 8 if loaded.device.type == "cpu" else 64


def plan_decoding(
    loaded: LoadedModel,
    *,
    tree: str | None = None,
    guesses: str | None = None,
    prompt_tokens: str | None = None,
    budget: int | None = None,
) -> Plan:
    """Choose the tree and the source of guesses.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    tree : str, optional
        File of a tree design or of a switching table, or ``none`` for plain decoding; without it one is searched for
        the guesses.
    guesses : {"prompt", "free", "lookup"}, optional
        Source of guesses. Without it: prompt tokens where there are some for this model; else lookup for a tree that
        counts no prompt tokens, or for none; else free.
    prompt_tokens : str, optional
        Folder of prompt tokens; without it the ones shipped for the model, if any.
    budget : int, optional
        Budget of the search when no tree is given; `default_budget` without it.

    Raises
    ------
    TreeOptError
        When a file is wrong or the parts do not fit together.
    """
    if tree == "none":
        return Plan(None, None)
    design = None if tree is None else _read_design(tree)
    if guesses is None:
        needs_none = design is not None and design.tokens_per_prompt_token == 0
        has_tokens = prompt_tokens is not None or _shipped(loaded) is not None
        guesses = "prompt" if has_tokens and not needs_none else "lookup" if design is None or needs_none else "free"
    tokens = _prompt_tokens(loaded, prompt_tokens) if guesses == "prompt" else None
    num_distances = len(ROUGH_MARGINALS["free"]) if design is None else design.num_distances
    source = guess_source(loaded, guesses, num_distances, tokens)
    if design is None:
        design = search(_table(loaded, source, own=prompt_tokens is None), budget or default_budget(loaded))
    return Plan(design, source)


def _read_design(path: str) -> TreeDesign | SwitchTable:
    document: object = from_document(read_json(path), path)
    if not isinstance(document, TreeDesign | SwitchTable):
        raise DocumentError(
            f"{path}: holds a treeopt document of another kind; give a tree design or a switching table"
        )
    return document


def _shipped(loaded: LoadedModel) -> str | None:
    """Return the name of what is shipped for a model, if it is."""
    name = SHIPPED.get(loaded.name)
    return name if name is not None and (resources.files("ppd_runtime") / "data" / name).is_dir() else None


def _prompt_tokens(loaded: LoadedModel, folder: str | None) -> PromptTokens:
    if folder is not None:
        return load_prompt_tokens(folder)
    name = _shipped(loaded)
    if name is None:
        raise DocumentError(
            f"prompt tokens: none are shipped for {loaded.name}; give --prompt-tokens, or use --guesses free or lookup"
        )
    with resources.as_file(resources.files("ppd_runtime") / "data" / name) as shipped:
        return load_prompt_tokens(Path(shipped))


def _table(loaded: LoadedModel, source: GuessSource, *, own: bool) -> AcceptanceTable:
    """Return the table to search a default tree with: the shipped one for shipped prompt tokens, else a rough one."""
    name = _shipped(loaded)
    if source.name == "prompt" and own and name is not None:
        return load_acceptance(name)[0]
    rough = ROUGH_MARGINALS[source.name]
    # Farther than the rough figures reach, the last row goes on.
    rows = [rough[min(j, len(rough) - 1)] for j in range(source.num_distances)]
    return AcceptanceTable.from_marginals(rows, tokens_per_prompt_token=source.num_epts, model=loaded.name)


def stream_prompts(
    loaded: LoadedModel,
    prompts: Sequence[str],
    plan: Plan,
    settings: Settings,
    *,
    batch_size: int = 1,
    raw: bool = False,
) -> Iterator[TextPiece]:
    """Decode prompts in batches.

    Yields
    ------
    TextPiece
        With the index of the prompt among all prompts; those of one batch are interleaved.
    """
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        # Texts are numbered in their batch: without the shift every batch would repeat the random numbers of the first.
        own = replace(settings, seed=settings.seed + start)
        for piece in stream_batch(loaded, batch, plan.design, plan.source, own, raw=raw):
            yield TextPiece(start + piece.index, piece.token_ids, piece.text, piece.generation)


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals over texts. Speed is tokens after prefill over the time after prefill.

    Parameters
    ----------
    num_texts, num_steps, num_new_tokens : int
        Texts, forward passes after prefill, tokens written.
    tokens_per_step : float or None
        Achieved tau; each text's first token is prefill's.
    expected_tokens_per_step : float or None
        The design's acceptance length; None for a switching table.
    tokens_per_second : float or None
        Of texts decoded one by one, or of one batch, whose texts share the time.
    occupancy : tuple of float
        Share of steps in each state.
    prefill_s, decode_s, forward_s : float
        Seconds before and after the first tokens, and in the model's forward.
    """

    num_texts: int
    num_steps: int
    num_new_tokens: int
    tokens_per_step: float | None
    expected_tokens_per_step: float | None
    tokens_per_second: float | None
    occupancy: tuple[float, ...]
    prefill_s: float
    decode_s: float
    forward_s: float


def statistics(runs: Sequence[DecodeRun], design: TreeDesign | SwitchTable | None, *, batch_size: int = 1) -> Stats:
    """Add up what several texts took.

    Parameters
    ----------
    runs : sequence of DecodeRun
        In the order of the prompts.
    design : TreeDesign, SwitchTable or None
        What decoded them.
    batch_size : int
        Texts that were decoded together; a batch takes as long as its slowest text.
    """
    batches = [runs[start : start + batch_size] for start in range(0, len(runs), batch_size)]
    num_steps = sum(run.num_steps for run in runs)
    num_tokens = sum(run.num_new_tokens - 1 for run in runs)
    decode_s = sum(max(run.decode_s for run in batch) for batch in batches)
    num_states = max((len(run.steps_per_state) for run in runs), default=0)
    steps = [sum(run.steps_per_state[k] for run in runs if k < len(run.steps_per_state)) for k in range(num_states)]
    expected = 1.0 if design is None else design.acceptance_length if isinstance(design, TreeDesign) else None
    return Stats(
        num_texts=len(runs),
        num_steps=num_steps,
        num_new_tokens=sum(run.num_new_tokens for run in runs),
        tokens_per_step=num_tokens / num_steps if num_steps else None,
        expected_tokens_per_step=expected,
        tokens_per_second=num_tokens / decode_s if decode_s else None,
        occupancy=tuple(each / num_steps for each in steps) if num_steps else (),
        prefill_s=sum(max(run.prefill_s for run in batch) for batch in batches),
        decode_s=decode_s,
        forward_s=sum(max(run.forward_s or 0.0 for run in batch) for batch in batches),
    )
