"""Read the prompts: one flat pass that leaves every text in state m."""

import time
from itertools import pairwise

import torch
from torch import Tensor

from ppd_runtime import hf
from ppd_runtime.session import Session, Text, clear_memory_errors, enter_state, refuse_nan

__all__ = ["prefill"]

PREFILL_CHUNK = 1024
"""Prompt tokens per prefill pass: bounds the memory of the mask."""


@torch.inference_mode()
def prefill(session: Session) -> list[tuple[Text, list[int]]]:
    """Read the prompts, write each text's first token and make its first guesses.

    Every row of the batch is: prompt, m prompt tokens, padding. Long prompts go through in chunks.

    Returns
    -------
    list of (Text, list of int)
        The first token of each text.
    """
    started = time.perf_counter()
    with clear_memory_errors(session):
        for text in session.texts:
            text.steps_per_state = [0] * max(len(session.trees), len(text.steps_per_state))
            text.guesser = session.source.begin(text.prompt_ids) if session.source is not None else None
        logits = _prefill_logits(session)  # [b, 1 + m n, vocabulary]
        first = logits[:, 0].float()
        if session.source is not None and bool(first.isnan().any()):
            session.warn_not_finite()
            session.cache.settle([0] * len(session.texts))  # nothing of this prefill stays
            session.cache.discard()
            session.decode_plainly()
            return prefill(session)
        if bool(first.isnan().any()):
            raise refuse_nan(session)
        written = []
        for b, text in enumerate(session.texts):
            written.append((text, text.append([text.rule.next_token(first[b], text.token_ids, {})])))
            if text.guesser is not None:
                text.guesser.extend(text.new_ids)
                enter_state(
                    session, text, session.source.num_distances, len(text.prompt_ids) - 1, logits[b, 1:].clone()
                )
    for text in session.texts:
        text.prefill_s = time.perf_counter() - started
    return written


def _prefill_logits(session: Session) -> Tensor:
    """Run the prompts and return the logits of their last tokens and of the prompt tokens after them."""
    device, cache = session.loaded.device, session.cache
    lengths = torch.tensor([len(text.prompt_ids) for text in session.texts], device=device)  # [b]
    num_prompt_rows = 0 if session.source is None else session.source.num_distances * session.source.num_epts
    longest = int(lengths.max())
    width = longest + num_prompt_rows
    # Column c of row b holds prompt token row c - lengths[b] (negative: text; past the last: padding).
    chain = torch.arange(width, device=device) - lengths[:, None]  # [b, width]
    is_prompt_row = (chain >= 0) & (chain < num_prompt_rows)

    tokens = torch.zeros((len(session.texts), width), dtype=torch.long, device=device)
    positions = torch.arange(width, device=device).repeat(len(session.texts), 1)
    for b, text in enumerate(session.texts):
        tokens[b, : len(text.prompt_ids)] = torch.tensor(text.prompt_ids, device=device)
    if num_prompt_rows:
        distance = chain.clamp(0, num_prompt_rows - 1) // session.source.num_epts + 1
        positions = torch.where(is_prompt_row, lengths[:, None] - 1 + distance, positions)
    if session.limit is not None:
        positions.clamp_(max=session.limit - 1)
    embeddings = hf.embed_tokens(session.loaded.model, tokens)
    for b, text in enumerate(session.texts):
        if num_prompt_rows:
            embeddings[b, is_prompt_row[b]] = text.guesser.embeddings

    wanted = lengths[:, None] - 1 + torch.arange(1 + num_prompt_rows, device=device)  # [b, 1 + m n]
    logits: Tensor | None = None
    # The last chunk holds all prompt-token rows of the longest text: after it every text's columns are settled.
    edges = [*range(0, longest, PREFILL_CHUNK), width]
    for start, end in pairwise(edges):
        columns = cache.open(end - start, start=start)
        mask = _prefill_mask(session, chain, start, end, columns)
        here = (wanted >= start) & (wanted < end)
        rows = wanted[here].unique() - start
        if not len(rows):
            rows = torch.zeros(1, dtype=torch.long, device=device)
        part = hf.forward_rows(
            session.loaded.model,
            inputs_embeds=embeddings[:, start:end],
            mask=mask,
            position_ids=positions[:, start:end],
            cache=cache,
            rows=rows,
        )
        if logits is None:
            logits = part.new_zeros((*wanted.shape, part.shape[-1]))
        batch_rows, places = here.nonzero(as_tuple=True)
        logits[batch_rows, places] = part[batch_rows, torch.searchsorted(rows, wanted[here] - start)]
    cache.settle(lengths.tolist())
    return logits


def _prefill_mask(session: Session, chain: Tensor, start: int, end: int, num_columns: int) -> Tensor:
    """Return which of rows ``start .. end-1`` sees which column, shape (b, 1, end - start, num_columns).

    Text is causal; a prompt-token row sees the whole text and its chain; padding sees whatever came before it.
    """
    columns = torch.arange(num_columns, device=chain.device)
    mask = (columns <= torch.arange(start, end, device=chain.device)[:, None]).repeat(len(chain), 1, 1)
    visibility = None if session.source is None else session.source.visibility
    if visibility is not None:
        m_n = len(visibility)
        for b in range(len(chain)):
            first = int((chain[b] < 0).sum())
            low, high = max(start, first), min(end, first + m_n)
            if low < high:
                stop = min(first + m_n, num_columns)
                mask[b, low - start : high - start, first:stop] = visibility[
                    low - first : high - first, : stop - first
                ].to(mask.device)
    return mask[:, None]
