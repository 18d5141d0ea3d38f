"""Prompt tokens: the trained embeddings, and which of them see which.

==================  ==========================================================================
prompt token ``j``  guesses distance ``j``; sits ``j`` positions after the token it follows
EPT                 ensemble prompt token: one of the ``n`` embeddings of a prompt token, all at
                    the same position; their logits are averaged (paper section 3.2)
flat order          prompt token by prompt token, inside each EPT by EPT: the EPT ``i`` of
                    prompt token ``j`` is row ``(j - 1) * n + i``, in files as in masks
==================  ==========================================================================

Their files are read and written by `ppd_runtime.token_files`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from treeopt.errors import InvalidValueError, ModelError

__all__ = [
    "MASKS",
    "MAX_DISTANCES",
    "PromptTokens",
    "check_base_model",
    "free_prompt_tokens",
    "prompt_visibility",
    "random_prompt_tokens",
]

MASKS = ("ensemble", "decoder", "encoder")
"""How the EPTs of one group see each other; see `prompt_visibility`."""

MAX_DISTANCES = 8
"""Most prompt tokens that can be trained, m."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """Trained embeddings that make a frozen model guess several tokens ahead.

    Parameters
    ----------
    embeddings : Tensor, float32, shape (m, num_epts, hidden)
        One embedding per EPT, in the space of the model's input embeddings.
    mask : {"ensemble", "decoder", "encoder"}
        How EPTs see each other.
    base_model : str
        Name of the model that they were trained for.
    base_digest : str, optional
        SHA-256 that identifies that model's weights; None when unknown.
    training : mapping
        How they came to be: command, data, schedule, results. Free-form, JSON.

    Raises
    ------
    InvalidValueError
        When the shape, the type, a value or the mask is wrong.
    """

    embeddings: Tensor
    mask: str
    base_model: str
    base_digest: str | None = None
    training: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        shape = tuple(self.embeddings.shape)
        if len(shape) != 3 or 0 in shape:
            raise InvalidValueError("embeddings", f"must have the shape (m, EPTs, hidden), not {shape}")
        if shape[0] > MAX_DISTANCES:
            raise InvalidValueError(
                "embeddings", f"has {shape[0]} prompt tokens; at most {MAX_DISTANCES} are supported"
            )
        if self.embeddings.dtype != torch.float32:
            raise InvalidValueError(
                "embeddings", f"must be float32, not {self.embeddings.dtype}; convert with .float()"
            )
        if not bool(torch.isfinite(self.embeddings).all()):
            raise InvalidValueError(
                "embeddings", "holds values that are not finite; train again from a good checkpoint"
            )
        if self.mask not in MASKS:
            raise InvalidValueError("mask", f"must be one of {', '.join(MASKS)}, not {self.mask!r}")
        if not self.base_model:
            raise InvalidValueError("base_model", "is empty; name the model the prompt tokens belong to")

    @property
    def num_distances(self) -> int:
        """``m``: prompt tokens, and so distances that are guessed."""
        return self.embeddings.shape[0]

    @property
    def num_epts(self) -> int:
        """``n``: ensemble prompt tokens per prompt token; also the budget that one prompt token costs."""
        return self.embeddings.shape[1]

    @property
    def hidden_size(self) -> int:
        """Width of the model's input embeddings."""
        return self.embeddings.shape[2]


def prompt_visibility(m: int, num_epts: int, mask: str = "ensemble") -> Tensor:
    """Say which EPTs of one group see which.

    Parameters
    ----------
    m : int
        Prompt tokens of the group.
    num_epts : int
        EPTs per prompt token.
    mask : {"ensemble", "decoder", "encoder"}
        ensemble: EPT ``i`` sees the EPTs ``i`` of earlier prompt tokens and itself, so that the group holds
        ``num_epts`` independent guessers; decoder: every EPT before it in flat order, and itself; encoder: every EPT
        of earlier prompt tokens and all EPTs of its own prompt token.

    Returns
    -------
    Tensor, bool, shape (m * num_epts, m * num_epts)
        Row may see column; rows and columns in flat order.

    Raises
    ------
    InvalidValueError
        For an unknown mask or sizes below 1.

    Notes
    -----
    Paper section 3.2 and its ablation of attention masks. Whatever the mask, no EPT sees one of a later prompt token:
    the first k prompt tokens of a group behave the same with and without the others, which is what lets a tree carry
    fewer than m of them. With one EPT the three masks are the same.

    Examples
    --------
    >>> prompt_visibility(2, 2, "ensemble").int().tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    >>> prompt_visibility(2, 2, "encoder").int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    if m < 1 or num_epts < 1:
        raise InvalidValueError("prompt tokens", f"m and EPTs must be at least 1, not {m} and {num_epts}")
    flat = torch.arange(m * num_epts)
    distance, ept = flat // num_epts, flat % num_epts
    if mask == "ensemble":
        return (distance[:, None] >= distance[None, :]) & (ept[:, None] == ept[None, :])
    if mask == "decoder":
        return flat[:, None] >= flat[None, :]
    if mask == "encoder":
        return distance[:, None] >= distance[None, :]
    raise InvalidValueError("mask", f"must be one of {', '.join(MASKS)}, not {mask!r}")


def random_prompt_tokens(
    hidden_size: int,
    m: int,
    num_epts: int = 1,
    *,
    std: float = 0.02,
    seed: int = 0,
    mask: str = "ensemble",
    base_model: str = "untrained",
) -> PromptTokens:
    """Draw normal embeddings: the start of an ablation, or bad guesses for tests.

    Parameters
    ----------
    hidden_size, m, num_epts : int
        Shape.
    std : float
        Standard deviation of each value.
    seed : int
        The same seed gives the same embeddings on every device.
    mask, base_model : str
        As in `PromptTokens`.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(m, num_epts, hidden_size, generator=generator) * std
    return PromptTokens(embeddings, mask, base_model, None, {"method": "random", "std": std, "seed": seed})


def free_prompt_tokens(
    embedding_matrix: Tensor,
    m: int,
    token_ids: Tensor | None = None,
    *,
    base_model: str = "training-free",
    base_digest: str | None = None,
) -> PromptTokens:
    """Make prompt tokens without training: the mean of text-token embeddings.

    Parameters
    ----------
    embedding_matrix : Tensor, shape (vocabulary, hidden)
        The model's input embeddings.
    m : int
        Prompt tokens; all get the same embedding, their positions tell them apart.
    token_ids : Tensor, int, shape (count,), optional
        Tokens to average, for example those of the context, repeated tokens counting each time; the whole vocabulary
        without.
    base_model, base_digest : str
        As in `PromptTokens`.

    Notes
    -----
    Probing the embedding space of a frozen model for more than one future token: arXiv 2603.17942.
    """
    rows = embedding_matrix.detach()
    if token_ids is not None:
        if token_ids.numel() == 0:
            raise InvalidValueError("token_ids", "is empty; give at least one token, or none for the whole vocabulary")
        rows = rows[token_ids.flatten()]
    mean = rows.float().mean(dim=0).cpu()
    source = "vocabulary" if token_ids is None else f"{token_ids.numel()} tokens"
    return PromptTokens(
        mean.expand(m, 1, -1).clone(), "ensemble", base_model, base_digest, {"method": "free", "mean_of": source}
    )


def check_base_model(
    tokens: PromptTokens, *, hidden_size: int, base_model: str | None = None, base_digest: str | None = None
) -> None:
    """Refuse prompt tokens that belong to another model.

    Parameters
    ----------
    tokens : PromptTokens
        The prompt tokens.
    hidden_size : int
        Width of the model's input embeddings.
    base_model : str, optional
        The model's name, for the message.
    base_digest : str, optional
        The model's digest; compared when both sides know theirs.

    Raises
    ------
    ModelError
        When the width or the digest differs.
    """
    name = base_model or "this model"
    if tokens.hidden_size != hidden_size:
        raise ModelError(
            f"prompt tokens: trained for {tokens.base_model} with hidden size {tokens.hidden_size}, {name} has "
            f"{hidden_size}; use prompt tokens of this model or train some with treeopt train"
        )
    if tokens.base_digest and base_digest and tokens.base_digest != base_digest:
        raise ModelError(
            f"prompt tokens: trained for {tokens.base_model} (digest {tokens.base_digest[:12]}), {name} has digest "
            f"{base_digest[:12]}; use prompt tokens of this model or train some with treeopt train"
        )
