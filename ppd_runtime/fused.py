"""Two library operations that do the same arithmetic in fewer steps, for kernel plans on the CPU.

``gqa``
    Grouped-query attention without copies. transformers repeats every key and value once per query head before it
    calls torch's attention when a pass has several rows; torch can read the shared ones itself. The copies are as long
    as the text: at 2,000 tokens they cost several times the attention. Equal to the last bit.
``rms``
    RMS norms in one call instead of six. Only float32, where both round alike; types narrower than that are rounded
    between the six steps.

Both change how a model computes, not what: :func:`remove` puts everything back.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ppd_runtime import hf

__all__ = ["FUSED", "FusedNorm", "applied", "apply", "remove", "usable"]

FUSED = ("gqa", "rms")
"""Names of the fused operations, in the order in which a plan's name has them."""


def usable(model: nn.Module) -> tuple[str, ...]:
    """Return the fused operations that this model can use and gains from."""
    grouped = (
        isinstance(model, PreTrainedModel)
        and model.device.type == "cpu"
        and hf.attention_backend(model) == "sdpa"
        and any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())
    )
    norms = any(_is_plain_norm(module) for module in model.modules())
    return tuple(name for name, gains in zip(FUSED, (grouped, norms), strict=True) if gains)


def apply(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let a model use fused operations; each must be :func:`usable`."""
    if "gqa" in names:
        model.set_attn_implementation(hf.GROUPED_SDPA)
    if "rms" in names:
        for module in [module for module in model.modules() if _is_plain_norm(module)]:
            module.library_class = type(module)
            module.__class__ = FusedNorm


def remove(model: nn.Module) -> None:
    """Give a model back the library's operations."""
    if isinstance(model, PreTrainedModel) and hf.text_config(model.config)._attn_implementation == hf.GROUPED_SDPA:
        model.set_attn_implementation("sdpa")
    for module in model.modules():
        if type(module) is FusedNorm:
            module.__class__ = module.library_class
            del module.library_class


def applied(model: nn.Module) -> tuple[str, ...]:
    """Return the fused operations that a model uses."""
    grouped = isinstance(model, PreTrainedModel) and (
        hf.text_config(model.config)._attn_implementation == hf.GROUPED_SDPA
    )
    norms = any(type(module) is FusedNorm for module in model.modules())
    return tuple(name for name, used in zip(FUSED, (grouped, norms), strict=True) if used)


class FusedNorm(nn.Module):
    """An RMS norm of a model in one call; weight and epsilon are the original's."""

    library_class: type
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normed rows, shape as given."""
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@torch.inference_mode()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is what ``rms_norm`` computes: found by trying, for names tell little (Gemma adds 1)."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or not isinstance(epsilon, float):
        return False
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    rows = torch.linspace(-3, 2, 2 * weight.numel()).view(2, -1)
    return torch.allclose(module(rows), rms_norm(rows, weight.shape, weight, epsilon), rtol=1e-6, atol=1e-7)


def _grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Attend with shared keys, as `transformers` does with repeated ones; shapes as in its attention interface."""
    # Without a mask the library decides about causality; what else it may add to the scores is left to it too.
    if attention_mask is None or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        library = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return library(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(hf.GROUPED_SDPA, _grouped_attention)
# Without this, transformers would build no mask at all for the new name, also in its own `generate`.
AttentionMaskInterface.register(hf.GROUPED_SDPA, sdpa_mask)
