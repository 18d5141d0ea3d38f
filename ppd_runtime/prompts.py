"""Prompts: from files to texts, from texts to token ids."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppd_runtime.models import LoadedModel
from treeopt.errors import DecodeError, DocumentError

__all__ = ["encode_prompt", "read_prompts"]


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Read a file of prompts.

    Parameters
    ----------
    path : path
        JSON lines with a field ``prompt``, or with ``turns`` as MT-Bench has them (the first turn is taken); or plain
        text, one prompt a line. Empty lines are skipped. What the first line is, all lines must be.

    Returns
    -------
    list of str

    Raises
    ------
    DocumentError
        When the file cannot be read, is empty, or a line is not a prompt; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path}: cannot be read as text ({error}); give a UTF-8 file of prompts") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DocumentError(f"{path}: holds no prompt; write one a line, or JSON lines with a field prompt")
    if not lines[0][1].startswith("{"):
        return [line for _, line in lines]
    return [_prompt_of(line, f"{path}, line {number}") for number, line in lines]


def _prompt_of(line: str, place: str) -> str:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{place}: is not JSON ({error.msg}); every line of this file must be an object") from error
    prompt = document.get("prompt") if isinstance(document, Mapping) else None
    if prompt is None and isinstance(document, Mapping):
        turns = document.get("turns")
        prompt = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(prompt, str) or not prompt:
        raise DocumentError(f"{place}: has no prompt; give a text in the field prompt, or a list of texts in turns")
    return prompt


def encode_prompt(loaded: LoadedModel, prompt: str | Sequence[int], *, raw: bool = False) -> tuple[int, ...]:
    """Turn a prompt into token ids.

    Parameters
    ----------
    loaded : LoadedModel
        The model, with its tokenizer unless the prompt is token ids already.
    prompt : str or sequence of int
        A text, or token ids, which are taken as they are.
    raw : bool
        Leave out the chat template. Models without one get the raw text anyway.

    Raises
    ------
    DecodeError
        When there is nothing to decode, no tokenizer, or an id outside the vocabulary.
    """
    token_ids = _tokenize(loaded, prompt, raw) if isinstance(prompt, str) else tuple(int(token) for token in prompt)
    if not token_ids:
        raise DecodeError("prompt: is empty; give at least one token")
    size = loaded.model.get_input_embeddings().weight.shape[0]
    outside = [token for token in token_ids if not 0 <= token < size]
    if outside:
        raise DecodeError(
            f"prompt: token id {outside[0]} is outside the vocabulary of {size}; use this model's tokenizer"
        )
    return token_ids


def _tokenize(loaded: LoadedModel, prompt: str, raw: bool) -> tuple[int, ...]:
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise DecodeError(f"model {loaded.name}: has no tokenizer; give token ids instead of text")
    if raw or not tokenizer.chat_template:
        return tuple(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
