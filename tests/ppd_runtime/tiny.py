"""Tiny random models of every family the runtime claims, so that tests need no download.

``tiny_model("llama")`` returns a two-layer model in evaluation mode, float64, with frozen weights. Weights are drawn
wide (standard deviation 0.2, norms near 1), so that different inputs give clearly different logits and a wrong mask or
position cannot hide in rounding.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Sizes shared by the families that use Llama's names for them.
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

# family: (model type in transformers, what its config says). The name before "-" is the model type's family.
_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {**_GROUPED, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {**_GROUPED, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**_GROUPED}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 12}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 64}),
    "gemma": ("gemma", {**_GROUPED, "head_dim": 12}),
    "gemma2": ("gemma2", {**_GROUPED, "head_dim": 12, "sliding_window": 64, "query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        {
            **_GROUPED,
            "head_dim": 12,
            "sliding_window": 64,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi": ("phi", {**_COMMON, "partial_rotary_factor": 0.5}),
    "gpt-neox": ("gpt_neox", {**_COMMON, "rotary_pct": 0.5}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": (
        "opt",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 16,
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
"""Every family that :func:`tiny_model` can build."""


def tiny_model(
    family: str = "llama",
    *,
    vocab_size: int = 61,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
    **overrides: object,
) -> PreTrainedModel:
    """Build a tiny random model.

    Parameters
    ----------
    family : str
        One of ``FAMILIES``.
    vocab_size : int
        Rows of the vocabulary.
    seed : int
        Seed of the weights; the global random state is left as it was.
    dtype : torch.dtype
        Type of the weights; float64 where a test asserts exactness.
    attention : {"sdpa", "eager"}, optional
        Attention backend; sdpa unless the family cannot (Gemma 2 caps its attention scores).
    **overrides
        Fields of the model's config, for example ``num_hidden_layers=1`` or ``sliding_window=8``.
    """
    model_type, fields = _CONFIGS[family]
    # No token ends a text and none is padding unless a test asks for it: ids of the real models lie outside the
    # tiny vocabulary.
    specials = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **{**fields, **specials, "vocab_size": vocab_size, **overrides})
    backend = attention or ("eager" if family == "gemma2" else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=backend)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights stay near their start (1, or 0 where the model adds 1 itself).
                scale = 0.05 if "norm" in name or "ln_" in name else 0.2
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.to(dtype).eval().requires_grad_(False)
