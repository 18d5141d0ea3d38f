"""Load a model, refuse what cannot take a tree, and prove before use that it takes one.

``load_model("demo")`` fetches the small model that everything here is shown with; any decoder-only model of the
Hugging Face hub, a local folder or a GGUF file works the same way.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppd_runtime import hf, kernels
from ppd_runtime.demo_model import DEMO_MODEL, demo_model_folder
from ppd_runtime.self_check import check_takes_tree
from treeopt.errors import ModelError

__all__ = ["LoadedModel", "load_model", "model_digest", "wrap_model"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

DIGEST_VALUES = 65_536
"""Values of each weight that the digest looks at."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in evaluation mode, with what the rest of the runtime asks about it.

    Parameters
    ----------
    model : PreTrainedModel
        The model itself; no weight takes a gradient.
    tokenizer : PreTrainedTokenizerBase or None
        Its tokenizer, where there is one.
    name : str
        What the model was asked for by.
    digest : str
        Identifies the base model in any dtype, see :func:`model_digest`.
    dtype : torch.dtype
        Type of the weights.
    device : torch.device
        Where the weights lie.
    context_limit : int or None
        Largest number of tokens whose positions the model handles; None when it says nothing.
    kernels : str
        Name of the plan that its linear layers follow, see `ppd_runtime.kernels`.
    """

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
    attention: str = "auto",
    kernels: str = "auto",
    self_check: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> LoadedModel:
    """Load a decoder-only language model for decoding with trees.

    Parameters
    ----------
    name : str
        ``demo`` (SmolLM2-135M-Instruct, see `ppd_runtime.demo_model`), a model id of the Hugging Face hub, a folder, or
        a ``.gguf`` file (its weights are unpacked to ``dtype``).
    dtype : {"float32", "bfloat16", "float16", "float64"}
        Type of the weights.
    device : str
        ``auto`` (CUDA where there is one, else the CPU) or a torch device.
    attention : {"auto", "sdpa", "eager"}
        Attention backend; ``auto`` is sdpa, or eager for models that cap their attention scores.
    kernels : str
        ``auto`` (measured once, then remembered), ``own``, or the name of a plan, see `ppd_runtime.kernels`.
    self_check : bool
        Prove on a small random tree that the model takes one (a few short passes).
    progress : callable, optional
        Called as ``progress(what, share)``, share 0 to 1, while something takes long.

    Raises
    ------
    ModelError
        When the model cannot be found or read, or cannot take a tree, with the reason.
    """
    report = progress or (lambda what, share: None)
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype}: must be one of {', '.join(DTYPES)}")
    if attention != "auto":
        hf.refuse_backend(attention, name)
    target = _device(device)
    source = _source(name, progress)
    # The explanation of a failed load is the first line of the library's own.
    with _explained(f"model {name}"):
        config = AutoConfig.from_pretrained(**source)
    hf.refuse_unsupported(config, name)
    backend = hf.default_attention(config)
    if attention == "sdpa" != backend:
        raise ModelError(f"model {name}: its attention computes what sdpa cannot; use attention auto or eager")
    if attention != "auto":
        backend = attention
    report(f"loading {name}", 0.0)
    with _explained(f"model {name}"), hf.quiet_progress():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = hf.read_weights(source, dtype=DTYPES[dtype], attention=backend).to(target)
    report(f"loading {name}", 0.7)
    loaded = wrap_model(model, tokenizer, name=name, kernels=kernels, self_check=self_check)
    report(f"loading {name}", 1.0)
    return loaded


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str | None = None,
    kernels: str = "own",
    self_check: bool = True,
) -> LoadedModel:
    """Take a model that is already built.

    The model is put in evaluation mode and its weights are frozen; nothing is copied.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    tokenizer : PreTrainedTokenizerBase, optional
        Its tokenizer.
    name : str, optional
        Name for messages and records; by default where the model was loaded from, or its class.
    kernels : str
        As for :func:`load_model`; by default the model's linear layers are left alone.
    self_check : bool
        As for :func:`load_model`.

    Raises
    ------
    ModelError
        When the model cannot take a tree, with the reason.
    """
    name = name or model.config.name_or_path or type(model).__name__
    hf.refuse_unsupported(model.config, name)
    hf.refuse_backend(hf.attention_backend(model), name)
    model.eval().requires_grad_(False)
    plan = _apply_kernels(model, kernels)
    if self_check:
        check_takes_tree(model, name)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        digest=model_digest(model),
        dtype=model.dtype,
        device=model.device,
        context_limit=hf.context_limit(model.config),
        kernels=plan,
    )


def model_digest(model: PreTrainedModel) -> str:
    """Return the SHA-256 that identifies a base model, whatever dtype and device it was loaded in.

    It covers the model's type and, for every weight, its name, shape and the signs of up to ``DIGEST_VALUES`` evenly
    spaced values. Signs survive a change of dtype, which values do not; a fine-tuned model differs because training
    turns the signs of some values near zero. The cost does not grow with the width of the model: well under a second
    for billions of weights.

    Returns
    -------
    str
        64 hexadecimal digits. Weights that only the config tells apart (another RoPE base) share one.
    """
    digest = hashlib.sha256(model.config.model_type.encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"\n{name} {tuple(weight.shape)}\n".encode())
        values = weight.detach().reshape(-1)
        signs = torch.signbit(values[:: max(1, values.numel() // DIGEST_VALUES)])
        digest.update(signs.cpu().numpy().tobytes())
    return digest.hexdigest()


def _source(name: str, progress: Callable[[str, float], None] | None) -> dict[str, str]:
    """Return the arguments by which transformers finds a model."""
    if name == DEMO_MODEL:
        return {"pretrained_model_name_or_path": str(demo_model_folder(progress))}
    if name.endswith(".gguf"):
        path = Path(name)
        if not path.is_file():
            raise ModelError(f"model {name}: no such file; name a GGUF file, a folder, a hub id, or {DEMO_MODEL}")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"device {name}: torch knows no such device; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name}: this machine has no CUDA device that torch can use; use auto or cpu")
    return device


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """Turn what a failed load raises into one line of our own."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = "check the name and the network, or give a folder"
        if isinstance(error, torch.OutOfMemoryError):
            remedy = "use a smaller dtype or another device"
        raise ModelError(f"{place}: {lines[0].rstrip('. ')}; {remedy}") from error


def _apply_kernels(model: PreTrainedModel, name: str) -> str:
    kernels.remove_plan(model)  # a plan from an earlier load would hide the layers to choose for
    plan = kernels.choose_plan(model) if name == "auto" else kernels.KernelPlan(name)
    kernels.apply_plan(model, plan)
    return plan.name
