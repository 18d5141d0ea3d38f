"""Prompt tokens in files: ours, and those that the paper's authors published.

A folder has the shape of a PEFT prompt-tuning adapter, as ``hmarkc/ppd-*`` on the Hugging Face Hub:
``adapter_config.json`` and ``adapter_model.safetensors`` with the one key ``prompt_embeddings``. A ``ppd`` section in
the configuration says what PEFT has no word for. Pickled weights are never opened.
"""

import os
from pathlib import Path

from torch import Tensor

from ppd_runtime.adapter_files import CONFIG_NAME, TENSOR_NAME, WEIGHTS_NAME, read_adapter, write_adapter
from ppd_runtime.prompt_tokens import PromptTokens, check_base_model
from treeopt.errors import DocumentError, InvalidValueError

__all__ = ["load_prompt_tokens", "push_prompt_tokens", "save_prompt_tokens"]

FORMAT = "ppd/1"
PPD_FIELDS = {"format", "num_distances", "num_epts", "mask", "hidden_size", "base_digest", "training"}


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
