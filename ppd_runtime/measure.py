"""How good the guesses are: the rank of every true next token among the guesses for its distance.

Teacher-forced: a text runs once, then all its groups of prompt tokens run in a few passes. Entry ``i`` of a text holds
what the decoder has at hand in the step whose root is new token ``i``: the guesses of the prompt tokens that followed
the token before it (for ``i = 0`` the prompt's last token: those are prefill's).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime.answers import Text
from ppd_runtime.groups import group_attention, group_logits, text_pass
from ppd_runtime.models import LoadedModel
from ppd_runtime.prompt_tokens import PromptTokens
from ppd_runtime.sampling import Typical
from treeopt.errors import TrainingError

__all__ = ["TextRanks", "measure_texts", "ranks_of"]

GROUP_ROWS = 192
"""Rows of prompt tokens in one pass: their logits over a large vocabulary are what takes memory."""


@dataclass(frozen=True, slots=True)
class TextRanks:
    """Ranks and probabilities of one text.

    Parameters
    ----------
    ranks : tuple of tuple of int, shape (entries, m)
        ``ranks[i][j-1]``: rank of new token ``i + j``; ``max_rank`` means that or worse, or past the end of the text.
    probabilities : tuple of tuple of float, same shape
        The guesser's probability of that token; 0 past the end.
    num_inside : int
        Entries from the start whose m distances are all inside the text: those that shares and joint counts use.
    """

    ranks: tuple[tuple[int, ...], ...]
    probabilities: tuple[tuple[float, ...], ...]
    num_inside: int


def measure_texts(
    loaded: LoadedModel,
    tokens: PromptTokens,
    texts: Sequence[Text],
    *,
    max_rank: int = 10,
    typical: Typical | None = None,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[TextRanks]:
    """Measure guesses on texts that the model wrote.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    tokens : PromptTokens
        The prompt tokens.
    texts : sequence of Text
        The model's own answers, greedy or sampled.
    max_rank : int
        ``K``: ranks from here on are not told apart.
    typical : Typical, optional
        With it the rank of the best-ranked *acceptable* guess is recorded instead of the true token's.
    temperature : float
        Of the model's own distribution, for ``typical``.
    progress : callable, optional
        Called with the texts done and all there are.

    Returns
    -------
    list of TextRanks
        In the order of the texts; a text with fewer than two new tokens has no entries.

    Raises
    ------
    TrainingError
        When no text has two new tokens, or the logits are not finite.
    """
    if not any(text.num_new_tokens >= 2 for text in texts):
        raise TrainingError(
            "texts: none has two new tokens or more, so there is nothing to measure; raise max_new_tokens"
        )
    embeddings = tokens.embeddings.to(loaded.device)
    results = []
    with torch.inference_mode(), group_attention(loaded.model, tokens.num_distances * tokens.num_epts):
        for done, text in enumerate(texts, 1):
            parts = list(_text_parts(loaded, embeddings, tokens.mask, text, max_rank, typical, temperature))
            ranks = torch.cat([part[0] for part in parts]).tolist() if parts else []
            shares = torch.cat([part[1] for part in parts]).tolist() if parts else []
            results.append(
                TextRanks(
                    tuple(map(tuple, ranks)),
                    tuple(map(tuple, shares)),
                    max(0, text.num_new_tokens - tokens.num_distances),
                )
            )
            if progress is not None:
                progress(done, len(texts))
    return results


def ranks_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the rank of each token among all, best first, from 0; equal logits rank the smaller id first.

    Parameters
    ----------
    logits : Tensor, shape (..., vocabulary)
        Guesses.
    token_ids : LongTensor, shape (...)
        One token per row.

    Returns
    -------
    LongTensor, shape (...)
    """
    own = logits.gather(-1, token_ids[..., None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < token_ids[..., None]))
    return ahead.sum(-1)


def _text_parts(
    loaded: LoadedModel,
    embeddings: Tensor,
    mask: str,
    text: Text,
    max_rank: int,
    typical: Typical | None,
    temperature: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ranks and probabilities of consecutive entries, each of shape (groups, m)."""
    m = embeddings.shape[0]
    token_ids = torch.tensor(text.token_ids, device=loaded.device)
    first, num_entries = text.num_prompt_tokens - 1, text.num_new_tokens - 1
    if num_entries < 1:
        return
    # Without typical acceptance the model's own logits are not needed; one row keeps the pass in its usual shape.
    wanted = slice(first, None) if typical is not None else slice(-1, None)
    memory, own = text_pass(loaded.model, token_ids, wanted)
    distances = torch.arange(1, m + 1, device=loaded.device)
    groups_at_once = max(1, GROUP_ROWS // (m * embeddings.shape[1]))
    for insertions in torch.arange(first, first + num_entries, device=loaded.device).split(groups_at_once):
        guesses = group_logits(loaded.model, embeddings, memory, insertions, mask)
        guesses = guesses.to(torch.promote_types(guesses.dtype, torch.float32))
        if not bool(torch.isfinite(guesses).all()):
            raise TrainingError(
                "guesses: logits are not finite; measure with dtype float32 or train the prompt tokens again"
            )
        targets = insertions[:, None] + distances + 1
        inside = targets < len(token_ids)
        targets = targets.clamp(max=len(token_ids) - 1)
        if typical is None:
            ranks, chosen = ranks_of(guesses, token_ids[targets]), token_ids[targets]
        else:
            ranks, chosen = _typical_ranks(guesses, own[targets - 1 - first], typical, temperature, max_rank)
        shares = guesses.softmax(-1).gather(-1, chosen[..., None])[..., 0]
        yield ranks.clamp(max=max_rank).masked_fill(~inside, max_rank), shares.masked_fill(~inside, 0.0)


def _typical_ranks(
    guesses: Tensor, own: Tensor, typical: Typical, temperature: float, max_rank: int
) -> tuple[Tensor, Tensor]:
    """Return the rank of the best-ranked guess that the model finds typical, and that guess; (groups, m) each."""
    num_ranks = min(max_rank, guesses.shape[-1])
    best = guesses.topk(num_ranks, dim=-1).indices
    share = (own.to(guesses.dtype) / temperature).softmax(-1)
    rows = share.reshape(-1, share.shape[-1])
    threshold = torch.stack([typical.threshold(row) for row in rows]).reshape(share.shape[:-1])
    acceptable = share.gather(-1, best) > threshold[..., None]
    first = torch.where(acceptable.any(-1), acceptable.int().argmax(-1), max_rank)
    return first, best.gather(-1, first.clamp(max=num_ranks - 1)[..., None])[..., 0]
