"""Insertion groups: prompt tokens after many positions of a text, in one pass.

A *group* is the m prompt tokens that follow one token of a text. The text runs once; then all groups run against its
keys and values, each seeing the text up to its own token and itself, never another group. So a pass over G groups
gives what G separate decoding steps would give, at those steps' positions:

=====================  ==============================================================================
insertion ``p``        index of the token that a group follows
prompt token ``j``     sits at position ``p + j``; its logits guess the token at ``p + j + 1``
row                    one EPT of one group; group by group, in each the flat order of prompt tokens
=====================  ==============================================================================
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ppd_runtime import hf
from ppd_runtime.prompt_tokens import prompt_visibility

__all__ = ["group_attention", "group_logits", "group_mask", "group_positions", "text_pass"]

TextMemory = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of a text, layer by layer, each of shape (1, heads, tokens, head_dim)."""


def text_pass(model: PreTrainedModel, token_ids: Tensor, rows: Tensor | slice) -> tuple[TextMemory, Tensor]:
    """Run a text through the frozen model, without gradients.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    token_ids : LongTensor, shape (tokens,)
        The text.
    rows : LongTensor or slice
        Positions whose logits are wanted.

    Returns
    -------
    memory : tuple of (Tensor, Tensor)
        Keys and values of every layer.
    logits : Tensor, shape (rows, vocabulary)
        The model's own predictions there, in its dtype.
    """
    num_tokens = token_ids.shape[0]
    device = token_ids.device
    cache = DynamicCache()
    with torch.no_grad():
        logits = hf.forward_rows(
            model,
            inputs_embeds=hf.embed_tokens(model, token_ids[None]),
            mask=torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()[None, None],
            position_ids=torch.arange(num_tokens, device=device)[None],
            cache=cache,
            rows=rows,
        )
    return tuple((layer.keys, layer.values) for layer in cache.layers), logits[0]


def group_logits(
    model: PreTrainedModel, embeddings: Tensor, memory: TextMemory, insertions: Tensor, mask: str = "ensemble"
) -> Tensor:
    """Run one group after each insertion and return its guesses.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    embeddings : Tensor, shape (m, num_epts, hidden)
        The prompt tokens; gradients flow to them when they ask for any.
    memory : tuple of (Tensor, Tensor)
        What `text_pass` returned; it is left as it is.
    insertions : LongTensor, shape (groups,)
        Indices of the tokens that the groups follow.
    mask : {"ensemble", "decoder", "encoder"}
        How EPTs see each other.

    Returns
    -------
    Tensor, shape (groups, m, vocabulary)
        Logits, averaged over the EPTs of a prompt token, in the model's dtype (float32 or wider when averaged).
    """
    m, num_epts, hidden = embeddings.shape
    num_groups = insertions.shape[0]
    num_text = memory[0][0].shape[-2]
    positions = group_positions(insertions, m, num_epts)
    limit = hf.context_limit(model.config)
    if limit is not None:
        positions = positions.clamp(max=limit - 1)  # past it lie only guesses at tokens past the end of the text
    rows = embeddings.to(model.dtype).reshape(1, m * num_epts, hidden).expand(num_groups, -1, -1)
    logits = hf.forward_rows(
        model,
        inputs_embeds=rows.reshape(1, -1, hidden),
        mask=group_mask(insertions, num_text, prompt_visibility(m, num_epts, mask)),
        position_ids=positions,
        cache=DynamicCache([(keys, values) for keys, values in memory]),
    )
    logits = logits.reshape(num_groups, m, num_epts, -1)
    return logits[:, :, 0] if num_epts == 1 else logits.to(torch.promote_types(logits.dtype, torch.float32)).mean(dim=2)


def group_mask(insertions: Tensor, num_text: int, visibility: Tensor) -> Tensor:
    """Say what every row of every group sees: the text up to its insertion, and its own group.

    Parameters
    ----------
    insertions : LongTensor, shape (groups,)
        Indices of the tokens that the groups follow.
    num_text : int
        Tokens of the text.
    visibility : BoolTensor, shape (size, size)
        What rows see inside their group, from `prompt_visibility`.

    Returns
    -------
    BoolTensor, shape (1, 1, groups * size, num_text + groups * size)
    """
    device = insertions.device
    num_groups, size = insertions.shape[0], visibility.shape[0]
    sees_text = torch.arange(num_text, device=device) <= insertions[:, None]
    same_group = torch.eye(num_groups, dtype=torch.bool, device=device)
    sees_rows = same_group[:, None, :, None] & visibility.to(device)[None, :, None, :]
    sees_rows = sees_rows.reshape(num_groups * size, num_groups * size)
    return torch.cat([sees_text.repeat_interleave(size, dim=0), sees_rows], dim=1)[None, None]


def group_positions(insertions: Tensor, m: int, num_epts: int) -> Tensor:
    """Return the positions of all rows: the EPTs of prompt token ``j`` share ``p + j``; shape (1, rows)."""
    distances = torch.arange(1, m + 1, device=insertions.device).repeat_interleave(num_epts)
    return (insertions[:, None] + distances).reshape(1, -1)


@contextmanager
def group_attention(model: PreTrainedModel, group_size: int) -> Iterator[bool]:
    """Let the model's attention use the block structure of `group_mask` while inside.

    Ordinary attention computes, and on a CPU mostly spends its backward pass on, scores between rows of different
    groups and gradients of the text's keys, only to throw both away. Here rows meet the text and their own group only.

    Parameters
    ----------
    model : PreTrainedModel
        The model; its attention is put back on leaving.
    group_size : int
        Rows per group, ``m * num_epts``.

    Yields
    ------
    bool
        Whether the faster attention is in use. It stays off, and everything works as before, unless the model runs
        sdpa attention on a CPU with one kind of layer.
    """
    before = model.config._attn_implementation  # the exact name: a kernel plan may have put a variant of sdpa there
    usable = (
        hf.attention_backend(model) == "sdpa" and model.device.type == "cpu" and hf.sliding_window(model.config) is None
    )
    if not usable:
        yield False
        return
    name = f"ppd_groups_of_{group_size}"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_blockwise_attention, group_size=group_size))
    model.set_attn_implementation(name)
    try:
        yield True
    finally:
        model.set_attn_implementation(before)


def _blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    group_size: int,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend to the text and to the own group; shapes as in transformers' attention interface.

    query: (1, heads, rows, head_dim); key, value: (1, kv_heads, text + rows, head_dim); mask: (1, 1, rows, columns)
    A pass without a text before it is the text's own: ordinary attention.
    """
    num_rows, num_text = query.shape[2], key.shape[2] - query.shape[2]
    if num_text == 0:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)
    kv_heads, head_dim = key.shape[1], key.shape[3]
    repeats = query.shape[1] // kv_heads
    groups = num_rows // group_size
    scale = head_dim**-0.5 if scaling is None else scaling
    # Query heads that share keys become rows of one product: (kv_heads, repeats * rows, head_dim).
    q = (query[0] * scale).reshape(kv_heads, repeats * num_rows, head_dim)
    text_scores = (q @ key[0, :, :num_text].detach().transpose(1, 2)).view(
        kv_heads, repeats, groups, group_size, num_text
    )
    own_q = q.view(kv_heads, repeats, groups, group_size, head_dim)
    own_key = key[0, :, num_text:].reshape(kv_heads, 1, groups, group_size, head_dim)
    own_value = value[0, :, num_text:].reshape(kv_heads, 1, groups, group_size, head_dim)
    own_scores = own_q @ own_key.transpose(-1, -2)
    own_mask = attention_mask[0, 0, :group_size, num_text : num_text + group_size]
    text_mask = attention_mask[0, 0, ::group_size, :num_text][:, None, :]
    scores = torch.cat([text_scores + text_mask, own_scores + own_mask], dim=-1)
    work = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=work).to(query.dtype)
    text_weights = weights[..., :num_text].reshape(kv_heads, repeats * num_rows, num_text)
    text_part = (text_weights @ value[0, :, :num_text].detach()).view(kv_heads, repeats, groups, group_size, head_dim)
    output = text_part + weights[..., num_text:] @ own_value
    return output.reshape(1, kv_heads * repeats, num_rows, head_dim).transpose(1, 2).contiguous(), None
