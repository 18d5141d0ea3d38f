"""Texts to train and measure on: the model's own answers to prompts, or files of text.

Prompt tokens guess what *this model* will say, so its own answers are the best data: the text that a decoder will meet.
Answers are made in batches, kept in a cache file as they come, and picked up from there after an interruption.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from ppd_runtime import hf
from ppd_runtime.models import LoadedModel
from treeopt.errors import TrainingError

__all__ = ["Text", "answer_cache_path", "generate_answers", "read_texts"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Text:
    """One text as token ids.

    Parameters
    ----------
    token_ids : tuple of int
        The prompt, then what followed.
    num_prompt_tokens : int
        Tokens of the prompt, at least 1. In a text without a prompt the first token plays its part.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def num_new_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens


def read_texts(path: str | os.PathLike[str], loaded: LoadedModel, *, max_tokens: int) -> list[Text]:
    """Read texts to train on as they stand, without the model writing anything.

    Parameters
    ----------
    path : path
        A text file (cut into pieces), or JSON lines with ``text`` or ShareGPT's ``conversations``.
    loaded : LoadedModel
        Its tokenizer turns text into ids; conversations go through the chat template.
    max_tokens : int
        Longest piece, tokens; what is longer is cut into several.

    Raises
    ------
    TrainingError
        When the file is missing or empty, a record holds no text, or the model comes without a tokenizer.
    """
    path, tokenizer = Path(path), loaded.tokenizer
    if tokenizer is None:
        raise TrainingError(f"model {loaded.name}: comes without a tokenizer; texts cannot be read")
    is_text = path.suffix not in (".json", ".jsonl")
    records = [(str(path), _read(path))] if is_text else list(_records(path))
    texts = []
    for place, record in records:
        ids = _record_ids(place, record, tokenizer)
        pieces = (ids[start : start + max_tokens] for start in range(0, len(ids), max_tokens))
        texts += [Text(tuple(piece), 1) for piece in pieces if len(piece) > 2]
    if not texts:
        raise TrainingError(f"{path}: holds no text of more than two tokens; give a longer one")
    return texts


def answer_cache_path(folder: Path, loaded: LoadedModel, *, max_new_tokens: int, temperature: float, seed: int) -> Path:
    """Name the file that keeps answers of one model under one setting."""
    setting = f"{loaded.digest} {loaded.dtype} {max_new_tokens} {temperature:g} {seed if temperature else 0}"
    return folder / f"answers-{hashlib.sha256(setting.encode()).hexdigest()[:16]}.jsonl"


def generate_answers(
    loaded: LoadedModel,
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    cache_path: Path | None = None,
    progress: Progress | None = None,
) -> list[Text]:
    """Let the model answer prompts, in batches.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    prompt_ids : sequence of sequences of int
        Encoded prompts.
    max_new_tokens : int
        Longest answer; an end-of-text token ends one earlier and is part of it.
    batch_size : int
        Prompts answered together; those of similar length are put together. No pad token is needed.
    temperature : float
        0 takes the most probable token; above, tokens are sampled.
    seed : int
        For sampling; batches are drawn apart, so an interrupted run goes on as if it had not been.
    cache_path : Path, optional
        File that keeps finished batches; use `answer_cache_path` so that settings do not mix.
    progress : callable, optional
        Called with the answers done and all there are.

    Returns
    -------
    list of Text
        In the order of the prompts.

    Raises
    ------
    TrainingError
        When a prompt is empty or leaves no room in the context, or the cache cannot be written.
    """
    _check_prompts(loaded, prompt_ids, max_new_tokens)
    known = _read_cache(cache_path)
    missing = [i for i, ids in enumerate(prompt_ids) if tuple(ids) not in known]
    missing.sort(key=lambda i: len(prompt_ids[i]))
    for start in range(0, len(missing), batch_size):
        batch = [tuple(prompt_ids[i]) for i in missing[start : start + batch_size]]
        answers = _answer_batch(loaded, batch, max_new_tokens, temperature, seed)
        known.update(zip(batch, answers, strict=True))
        if cache_path is not None:
            _append_cache(cache_path, batch, answers)
        if progress is not None:
            progress(len(prompt_ids) - len(missing) + min(start + batch_size, len(missing)), len(prompt_ids))
    return [Text(tuple(ids) + known[tuple(ids)], len(ids)) for ids in prompt_ids]


def _check_prompts(loaded: LoadedModel, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompt_ids:
        raise TrainingError("prompts: there are none; give at least one")
    if max_new_tokens < 1:
        raise TrainingError(f"max_new_tokens: must be at least 1, not {max_new_tokens}")
    for i, ids in enumerate(prompt_ids):
        if not ids:
            raise TrainingError(f"prompts[{i}]: has no tokens; remove it")
        if loaded.context_limit is not None and len(ids) + max_new_tokens > loaded.context_limit:
            raise TrainingError(
                f"prompts[{i}]: has {len(ids)} tokens; with {max_new_tokens} new ones that is past the context of "
                f"{loaded.context_limit}; shorten it or ask for fewer new tokens"
            )


@torch.inference_mode()
def _answer_batch(
    loaded: LoadedModel, batch: Sequence[tuple[int, ...]], max_new_tokens: int, temperature: float, seed: int
) -> list[tuple[int, ...]]:
    """Answer prompts of different lengths: they are padded on the left and the padding is masked."""
    model, device = loaded.model, loaded.device
    width = max(map(len, batch))
    pads = torch.tensor([width - len(ids) for ids in batch], device=device)
    ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in batch], device=device)
    visible = torch.arange(width, device=device) >= pads[:, None]
    mask = visible[:, None, None, :] & torch.ones(width, width, dtype=torch.bool, device=device).tril()
    positions = (torch.arange(width, device=device) - pads[:, None]).clamp(min=0)
    cache = DynamicCache()
    generator = torch.Generator(device=device).manual_seed(_batch_seed(batch, seed))
    end_ids = torch.tensor(sorted(hf.eos_token_ids(model)), device=device, dtype=torch.long)
    ended = torch.zeros(len(batch), dtype=torch.bool, device=device)
    columns: list[Tensor] = []
    lengths = torch.full((len(batch),), max_new_tokens, device=device)
    for step in range(max_new_tokens):
        logits = hf.forward_rows(
            model,
            inputs_embeds=hf.embed_tokens(model, ids),
            mask=mask,
            position_ids=positions,
            cache=cache,
            rows=slice(-1, None),
        )[:, -1]
        token = _choose(logits, temperature, generator)
        columns.append(token)
        now_ended = torch.isin(token, end_ids) & ~ended
        lengths[now_ended] = step + 1
        ended |= now_ended
        if bool(ended.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        visible = torch.cat([visible, visible.new_ones(len(batch), 1)], dim=1)
        mask = visible[:, None, None, :]
    written = torch.stack(columns, dim=1).tolist()
    return [tuple(row[:length]) for row, length in zip(written, lengths.tolist(), strict=True)]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)[:, 0]


def _batch_seed(batch: Sequence[tuple[int, ...]], seed: int) -> int:
    """Derive a seed from what is answered, so that it does not matter which batches a run had done before."""
    return int.from_bytes(hashlib.sha256(repr((seed, list(batch))).encode()).digest()[:7], "big")


def _read_cache(path: Path | None) -> dict[tuple[int, ...], tuple[int, ...]]:
    if path is None or not path.exists():
        return {}
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # The line that an interruption cut short: that answer is made again.
        known[tuple(record["prompt_ids"])] = tuple(record["answer_ids"])
    return known


def _append_cache(path: Path, batch: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]]) -> None:
    lines = [
        json.dumps({"prompt_ids": ids, "answer_ids": answer}) + "\n" for ids, answer in zip(batch, answers, strict=True)
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line cut short by an interruption must not swallow the first new one.
        is_torn = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(("\n" if is_torn else "") + "".join(lines))
    except OSError as error:
        raise TrainingError(f"{path}: answers cannot be kept ({error.strerror or error}); free space") from error


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: cannot be read ({error}); give a UTF-8 file of text or JSON lines") from error


def _records(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the records of a file with their places: lines of text, JSON lines, or the entries of a JSON list."""
    content = _read(path)
    if path.suffix == ".json":
        try:
            entries = json.loads(content)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path}: is not JSON ({error}); JSON lines end in .jsonl") from error
        if not isinstance(entries, list):
            raise TrainingError(f"{path}: must hold a JSON list of records")
        yield from ((f"{path}[{i}]", entry) for i, entry in enumerate(entries))
        return
    for number, line in enumerate(content.split("\n"), 1):  # JSON strings may hold other line breaks
        if not line.strip():
            continue
        place = f"{path} line {number}"
        if path.suffix != ".jsonl":
            yield place, line
            continue
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{place}: is not JSON ({error}); correct or remove the line") from error


def _messages(record: dict[str, object]) -> list[tuple[str, object]]:
    """Return ShareGPT's messages with the roles that chat templates know."""
    roles = {"human": "user", "gpt": "assistant"}
    messages = record.get("conversations")
    if not isinstance(messages, list):
        return []
    return [
        (roles.get(role := str(message.get("from")), role), message.get("value"))
        for message in messages
        if isinstance(message, dict)
    ]


def _record_ids(place: str, record: object, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(record, str):
        return list(tokenizer(record)["input_ids"])
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return list(tokenizer(record["text"])["input_ids"])
    messages = _messages(record) if isinstance(record, dict) else []
    if not messages or not all(isinstance(value, str) for _, value in messages):
        raise TrainingError(f"{place}: holds no text; give an object with text or conversations")
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n".join(str(value) for _, value in messages))["input_ids"])
    chat = [{"role": role, "content": value} for role, value in messages]
    try:
        return list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])
    except TemplateError as error:
        raise TrainingError(f"{place}: the chat template refuses it ({error}); correct or remove it") from error
