"""Every call whose shape depends on the version of transformers, and nothing else.

The rest of the runtime speaks of rows, masks and positions; this module turns them into what a Hugging Face causal
language model takes. A *row* here is one token of a pass, shape ``[batch, rows, hidden]``.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from treeopt.errors import ModelError

__all__ = [
    "attention_backend",
    "attention_mask",
    "cache_argument",
    "context_limit",
    "default_attention",
    "embed_tokens",
    "embedding_size",
    "eos_token_ids",
    "forward_rows",
    "quiet_progress",
    "read_weights",
    "refuse_backend",
    "refuse_unsupported",
    "sliding_window",
    "text_config",
    "vocab_size",
]

ATTENTION_BACKENDS = ("sdpa", "eager")
"""Attention backends that take a tree mask."""

GROUPED_SDPA = "sdpa_gqa"
"""Name under which `ppd_runtime.fused` registers sdpa that shares keys instead of repeating them."""

TREE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers whose memory is one key and value a token, which a tree can share and drop."""


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of a config that describes the decoder of text."""
    return config.get_text_config(decoder=True)


def embed_tokens(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Look up input embeddings as the model's own forward would.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    token_ids : LongTensor, shape (...)
        Token ids.

    Returns
    -------
    Tensor, shape (..., embedding size)
        Scaled where the model scales (Gemma's embedding module multiplies by the root of the hidden size itself).
        Learned positions are not included: the model adds them from the position ids.
    """
    return model.get_input_embeddings()(token_ids)


def forward_rows(
    model: PreTrainedModel,
    *,
    inputs_embeds: Tensor,
    mask: Tensor,
    position_ids: Tensor,
    cache: object | None,
    rows: Tensor | slice | None = None,
) -> Tensor:
    """Run one pass over rows that see each other only where the mask says so.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    inputs_embeds : Tensor, shape (batch, q, embedding size)
        Input embeddings of the rows.
    mask : BoolTensor, shape (batch or 1, 1, q, kv)
        True where a row may attend; the columns are the keys that the cache returns for this pass, which for a growing
        cache are the cached tokens followed by the rows. Columns that a row attends to lie in the order of their
        positions (parents before children); sliding windows are laid over the mask here and rely on it.
    position_ids : LongTensor, shape (batch or 1, q)
        Position of each row in its text, from 0.
    cache : Cache or None
        Anything with transformers' ``update(keys, values, layer_idx)``. Layers keep every token, also those of
        sliding-window models. None runs without a cache.
    rows : LongTensor, slice or None
        Rows whose logits are wanted, the same in every row of the batch; None for all. The head runs for these only.

    Returns
    -------
    Tensor, shape (batch, len(rows), vocabulary)
        Logits, in the model's dtype.
    """
    if isinstance(rows, slice):
        rows = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[rows]
    keep = {"logits_to_keep": rows} if rows is not None and _takes(type(model), "logits_to_keep") else {}
    logits = model(
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask(model, mask, inputs_embeds.dtype),
        position_ids=position_ids,
        use_cache=cache is not None,
        return_dict=True,
        **{cache_argument(model): cache},
        **keep,
    ).logits
    return logits if keep or rows is None else logits[:, rows]


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name by which a model's forward takes its cache."""
    return "cache" if _takes(type(model), "cache") else "past_key_values"


_arguments_of: dict[type, frozenset[str]] = {}


@torch.compiler.assume_constant_result
def _takes(model_class: type, argument: str) -> bool:
    """Say whether a model's forward has an argument: transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    if model_class not in _arguments_of:  # not functools' cache, which torch.compile warns of
        _arguments_of[model_class] = frozenset(inspect.signature(model_class.forward).parameters)
    return argument in _arguments_of[model_class]


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal; ours say what matters."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read_weights(source: dict[str, str], *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Read a causal language model.

    Parameters
    ----------
    source : dict
        Arguments by which transformers finds a model: ``pretrained_model_name_or_path``, and ``gguf_file`` for GGUF,
        whose blocks are unpacked to ``dtype`` (transformers would otherwise keep them quantised).
    dtype : torch.dtype
        Type of the weights.
    attention : str
        Attention backend.
    """
    unpack = {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in source else {}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, attn_implementation=attention, **unpack)


def attention_mask(model: PreTrainedModel, mask: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Turn a boolean mask into what the model's attention takes.

    Both backends take the additive form, and a boolean one would be converted again in every layer by sdpa and added
    as 0 and 1, silently wrong, by eager attention. The lowest finite value stands for "may not attend": with minus
    infinity a row that attends to nothing (padding) would become NaN.

    Returns
    -------
    Tensor or dict of Tensor, shape (batch or 1, 1, q, kv)
        A mapping from layer type to mask when layers with a sliding window alternate with others and the text is
        longer than the window.
    """
    full = _additive(mask, dtype)
    window = sliding_window(model.config)
    if window is None or mask.shape[-1] <= window:
        return full
    sliding = _additive(_last_attended(mask, window), dtype)
    layer_types = getattr(text_config(model.config), "layer_types", None)
    if layer_types is None or set(layer_types) == {"sliding_attention"}:
        return sliding
    return {"full_attention": full, "sliding_attention": sliding}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _last_attended(mask: Tensor, window: int) -> Tensor:
    """Keep the last ``window`` attended columns of every row.

    A row attends to one token a position, from 0 to its own, in order: the number of attended columns to the right of
    a key is its distance in positions, whatever else lies between in the cache.
    """
    reached = mask.cumsum(-1)
    return mask & (reached[..., -1:] - reached < window)


def sliding_window(config: PretrainedConfig) -> int | None:
    """Return how many tokens, its own included, a token sees in sliding-window layers; None without such layers."""
    config = text_config(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def context_limit(config: PretrainedConfig) -> int | None:
    """Return the largest number of tokens whose positions the model handles; None when it says nothing.

    Rotary embeddings that change with the length of the text (dynamic NTK, LongRoPE) would turn the same token
    differently in a tree and in its linear path, so texts end where the change begins.
    """
    config = text_config(config)
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    # Models whose layer types turn differently have one set of parameters a type.
    limits += [
        parameters.get("original_max_position_embeddings")
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if parameters.get("rope_type") in ("dynamic", "longrope")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end a text; a model may have none, one or several."""
    found = model.generation_config.eos_token_id if model.can_generate() else None
    if found is None:
        found = getattr(text_config(model.config), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of logits per row."""
    return int(model.get_output_embeddings().weight.shape[0])


def embedding_size(model: PreTrainedModel) -> int:
    """Return the width of an input embedding, the hidden size in all but a few models (OPT-350m projects)."""
    return int(model.get_input_embeddings().weight.shape[1])


def attention_backend(model: PreTrainedModel) -> str:
    """Return the name of the attention backend that the model runs; how sdpa reads its keys is the kernel plan's."""
    name = str(text_config(model.config)._attn_implementation)
    return "sdpa" if name == GROUPED_SDPA else name


def default_attention(config: PretrainedConfig) -> str:
    """Return the fastest attention backend that takes a tree mask and that the model supports.

    Gemma 2, for one, caps its attention scores, which torch's fused attention cannot.
    """
    return "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa else "eager"


def refuse_backend(backend: str, name: str) -> None:
    """Refuse attention backends that cannot take a tree mask.

    Raises
    ------
    ModelError
        Naming the backends that can.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ModelError(
            f"model {name}: attention {backend} takes no mask of rows and columns, which a tree needs; "
            f"load it with attention {' or '.join(ATTENTION_BACKENDS)}"
        )


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Refuse models that cannot take a tree, by what their config and class say.

    Raises
    ------
    ModelError
        With the reason. What a config does not tell is left to the self-check.
    """
    reason = _unsupported_reason(config)
    if reason is not None:
        raise ModelError(f"model {name}: {reason}; choose a decoder-only model with full or sliding-window attention")


def _unsupported_reason(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal language model of type {config.model_type}"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a recurrent state, which a tree's branches cannot share and drop"
    config = text_config(config)
    # MPT turns ALiBi on in a part of its config; Bloom has nothing else.
    uses_alibi = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    if uses_alibi or config.model_type == "bloom":
        return "ALiBi derives distances from the order of the tokens in the cache, which is not a tree's"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - TREE_LAYER_TYPES)
    if others:
        return f"its layers of type {', '.join(others)} cannot take a tree mask"
    return None
