"""The texts that training and measuring work on: the model's answers to a file of prompts, kept in the user's cache."""

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from ppd_runtime.answers import Text, answer_cache_path, generate_answers, read_texts
from ppd_runtime.demo_model import cache_folder
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompts import encode_prompt, read_prompts

__all__ = ["answers_to", "held_out_texts", "shipped_prompts", "source_line", "training_texts"]

Progress = Callable[[str], None]

HELD_OUT_TOKENS = 128
"""Longest answer that is evaluated on."""
MAX_TEXT_TOKENS = 512
"""Longest piece of a text file that is trained on as it stands."""


def answers_to(
    loaded: LoadedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    raw: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> list[Text]:
    """Let the model answer prompts, from the user's cache where it has answered them before.

    Raises
    ------
    TrainingError
        When a prompt is past the context.
    """
    ids = [encode_prompt(loaded, prompt, raw=raw) for prompt in prompts]
    say = progress or (lambda text: None)
    return generate_answers(
        loaded,
        ids,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
        cache_path=answer_cache_path(
            cache_folder() / "answers", loaded, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        ),
        progress=lambda done, total: say(f"answer {done} of {total}"),
    )


def training_texts(
    loaded: LoadedModel,
    *,
    prompts: str | None,
    data: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    progress: Progress | None = None,
) -> list[Text]:
    """Return the texts to train on: a file as it stands, or answers to prompts (the shipped ones by default)."""
    if data is not None:
        limit = min(MAX_TEXT_TOKENS, loaded.context_limit or MAX_TEXT_TOKENS)
        return read_texts(data, loaded, max_tokens=limit - 8)
    return answers_to(
        loaded,
        read_prompts(prompts or shipped_prompts("prompts.jsonl")),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        progress=progress,
    )


def held_out_texts(
    loaded: LoadedModel, prompts: str | None, *, max_new_tokens: int, progress: Progress | None = None
) -> list[Text]:
    """Return the model's greedy answers to prompts that are not trained on; none for a model without a tokenizer."""
    if prompts is None and loaded.tokenizer is None:
        return []
    wanted = read_prompts(prompts or shipped_prompts("prompts-held-out.jsonl"))
    return answers_to(loaded, wanted, max_new_tokens=min(max_new_tokens, HELD_OUT_TOKENS), progress=progress)


def shipped_prompts(name: str) -> Path:
    """Return the path of a file of prompts that comes with the package."""
    return Path(str(resources.files("ppd_runtime") / "data" / name))


def source_line(path: str | Path, texts: Sequence[Text], *, max_new_tokens: int, raw: bool, dtype: str) -> str:
    """Say in one line what was measured, for the documents."""
    form = "raw" if raw else "chat template"
    return (
        f"treeopt measure, {Path(path).name}: {len(texts)} prompts ({form}), up to {max_new_tokens} new tokens, {dtype}"
    )
