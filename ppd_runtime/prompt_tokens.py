"""Prompt tokens: the trained embeddings, which of them see which, and their files.

==================  ==========================================================================
prompt token ``j``  guesses distance ``j``; sits ``j`` positions after the token it follows
EPT                 ensemble prompt token: one of the ``n`` embeddings of a prompt token, all at
                    the same position; their logits are averaged (paper section 3.2)
flat order          prompt token by prompt token, inside each EPT by EPT: the EPT ``i`` of
                    prompt token ``j`` is row ``(j - 1) * n + i``, in files as in masks
==================  ==========================================================================

The files have the shape of a PEFT prompt-tuning adapter, as the paper's authors published theirs
(``hmarkc/ppd-*``): ``adapter_config.json`` and ``adapter_model.safetensors`` with the one key
``prompt_embeddings``. A ``ppd`` section in the configuration says what PEFT has no word for.
Pickled weights are never opened.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ppd_runtime.adapter_files import CONFIG_NAME, TENSOR_NAME, WEIGHTS_NAME, read_adapter, write_adapter
from treeopt.errors import DocumentError, InvalidValueError, ModelError

__all__ = [
    "MASKS",
    "MAX_DISTANCES",
    "PromptTokens",
    "check_base_model",
    "free_prompt_tokens",
    "load_prompt_tokens",
    "prompt_visibility",
    "push_prompt_tokens",
    "random_prompt_tokens",
    "save_prompt_tokens",
]

MASKS = ("ensemble", "decoder", "encoder")
"""How the EPTs of one group see each other; see `prompt_visibility`."""

MAX_DISTANCES = 8
"""Most prompt tokens that can be trained, m."""

FORMAT = "ppd/1"
PPD_FIELDS = {"format", "num_distances", "num_epts", "mask", "hidden_size", "base_digest", "training"}


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


def save_prompt_tokens(tokens: PromptTokens, folder: str | os.PathLike[str]) -> Path:
    """Write prompt tokens as a PEFT-shaped folder.

    Parameters
    ----------
    tokens : PromptTokens
        What to save.
    folder : path
        Made if missing; files of the same names are replaced.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    DocumentError
        When the files cannot be written.
    """
    folder = Path(folder)
    write_adapter(folder, _config_of(tokens), tokens.embeddings.detach().cpu().reshape(-1, tokens.hidden_size))
    return folder


def load_prompt_tokens(
    folder: str | os.PathLike[str],
    *,
    hidden_size: int | None = None,
    base_model: str | None = None,
    base_digest: str | None = None,
) -> PromptTokens:
    """Read prompt tokens from a PEFT-shaped folder, ours or the paper's authors'.

    Parameters
    ----------
    folder : path
        Holds ``adapter_config.json`` and ``adapter_model.safetensors``.
    hidden_size : int, optional
        The model's width; with it the prompt tokens are checked against the model (`check_base_model`).
    base_model, base_digest : str, optional
        The model's name and digest, for the same check.

    Returns
    -------
    PromptTokens
        Embeddings as float32 on the CPU.

    Raises
    ------
    DocumentError
        When a file is missing or is not what it should be.
    ModelError
        When the prompt tokens belong to another model.
    """
    folder = Path(folder)
    config, flat = read_adapter(folder)
    place = str(folder / CONFIG_NAME)
    section = config.get("ppd")
    try:
        tokens = _from_authors(config, flat) if section is None else _from_section(config, section, flat)
    except InvalidValueError as error:
        raise DocumentError(f"{place}: {error}") from error
    if hidden_size is not None:
        check_base_model(tokens, hidden_size=hidden_size, base_model=base_model, base_digest=base_digest)
    return tokens


def push_prompt_tokens(folder: str | os.PathLike[str], repo_id: str, *, private: bool = False) -> str:
    """Upload a saved folder to the Hugging Face Hub.

    Parameters
    ----------
    folder : path
        As `save_prompt_tokens` left it; it is loaded first, so that nothing broken is published.
    repo_id : str
        ``owner/name``; made when missing.
    private : bool
        Whether a new repository is private.

    Returns
    -------
    str
        Address of the commit.

    Raises
    ------
    DocumentError
        When the folder does not load or the upload fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    load_prompt_tokens(folder)
    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=str(folder),
            repo_id=repo_id,
            allow_patterns=[CONFIG_NAME, WEIGHTS_NAME, "README.md"],
            commit_message="Upload prompt tokens",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DocumentError(
            f"{repo_id}: the upload failed ({reason}); log in with hf auth login and try again"
        ) from error
    return commit.commit_url


def _config_of(tokens: PromptTokens) -> dict[str, object]:
    return {
        "peft_type": "PROMPT_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": tokens.base_model,
        "inference_mode": True,
        "num_virtual_tokens": tokens.num_distances * tokens.num_epts,
        "token_dim": tokens.hidden_size,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
        "ppd": {
            "format": FORMAT,
            "num_distances": tokens.num_distances,
            "num_epts": tokens.num_epts,
            "mask": tokens.mask,
            "hidden_size": tokens.hidden_size,
            "base_digest": tokens.base_digest,
            "training": dict(tokens.training),
        },
    }


def _from_section(config: dict[str, object], section: object, flat: Tensor) -> PromptTokens:
    if not isinstance(section, dict):
        raise InvalidValueError("ppd", "must be an object")
    if section.get("format") != FORMAT:
        raise InvalidValueError("ppd.format", f"is {section.get('format')!r}; this version reads {FORMAT}")
    unknown = sorted(set(section) - PPD_FIELDS)
    if unknown:
        raise InvalidValueError(f"ppd.{unknown[0]}", "is not a field of prompt tokens; remove it")
    m, num_epts = _size(section, "num_distances", "ppd."), _size(section, "num_epts", "ppd.")
    hidden_size = _size(section, "hidden_size", "ppd.")
    if hidden_size != flat.shape[1]:
        raise InvalidValueError("ppd.hidden_size", f"is {hidden_size} but {TENSOR_NAME} has width {flat.shape[1]}")
    digest, training = section.get("base_digest"), section.get("training", {})
    if digest is not None and not isinstance(digest, str):
        raise InvalidValueError("ppd.base_digest", "must be a text or null")
    if not isinstance(training, dict):
        raise InvalidValueError("ppd.training", "must be an object")
    return PromptTokens(_unflatten(flat, m, num_epts), str(section.get("mask")), _base_name(config), digest, training)


def _from_authors(config: dict[str, object], flat: Tensor) -> PromptTokens:
    """Read the configuration that hmarkc/parallel-prompt-decoding writes (its ``PromptConfig``)."""
    num_epts = _size(config, "virtual_tokens_per_special_token", "", default=1)
    m = _size(config, "num_special_tokens", "", default=max(1, flat.shape[0] // num_epts))
    for name, neutral in (("use_custom_lm_head", False), ("use_prefix_tuning", False), ("num_exits", 1)):
        if config.get(name, neutral) not in (neutral, None):
            raise InvalidValueError(name, f"is {config[name]!r}; only plain prompt tokens can be loaded")
    if str(config.get("aggregation_type", "mean")).lower().rsplit(".", 1)[-1] != "mean":
        raise InvalidValueError("aggregation_type", f"is {config['aggregation_type']!r}; only mean can be loaded")
    mask = str(config.get("vt_attention_type", "decoder")).lower().rsplit(".", 1)[-1]
    return PromptTokens(_unflatten(flat, m, num_epts), mask, _base_name(config), None, {"method": "imported"})


def _base_name(config: dict[str, object]) -> str:
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InvalidValueError("base_model_name_or_path", "must name the base model")
    return name


def _size(fields: dict[str, object], name: str, prefix: str, *, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidValueError(prefix + name, f"must be a whole number from 1, not {value!r}")
    return value


def _unflatten(flat: Tensor, m: int, num_epts: int) -> Tensor:
    if flat.shape[0] != m * num_epts:
        raise InvalidValueError(
            TENSOR_NAME, f"has {flat.shape[0]} rows; {m} prompt tokens of {num_epts} EPTs need {m * num_epts}"
        )
    return flat.reshape(m, num_epts, -1).contiguous()
