"""Load a model, refuse what cannot take a tree, and prove before use that it takes one.

``load_model("demo")`` fetches the small model that everything here is shown with; any decoder-only model of the
Hugging Face hub, a local folder or a GGUF file works the same way.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppd_runtime import hf
from treeopt.errors import ModelError

__all__ = ["LoadedModel", "load_model", "wrap_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in evaluation mode, with what the rest of the runtime asks about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    digest: str
    dtype: torch.dtype
    device: torch.device
    context_limit: int | None
    kernels: str


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    attention: str = "sdpa",
    kernels: str = "auto",
    self_check: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> LoadedModel:
    """Load a model by hub id, folder or GGUF file."""
    torch_dtype = getattr(torch, dtype)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    folder = name
    hf.refuse_unsupported(AutoConfig.from_pretrained(folder), name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, attn_implementation=attention).to(where)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return wrap_model(model, tokenizer, name=name, kernels=kernels, self_check=self_check)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str = "",
    kernels: str = "own",
    self_check: bool = True,
) -> LoadedModel:
    """Take a model that is already built."""
    hf.refuse_unsupported(model.config, name)
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name or model.config._name_or_path or type(model).__name__,
        digest=_digest(model),
        dtype=model.dtype,
        device=model.device,
        context_limit=hf.context_limit(model.config),
        kernels="own",
    )


def _digest(model: PreTrainedModel) -> str:
    return hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode()).hexdigest()
