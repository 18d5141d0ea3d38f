"""The files of a PEFT-shaped adapter folder: a JSON configuration and one safetensors tensor.

Only shapes and formats are checked here; `ppd_runtime.token_files` gives them meaning.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from treeopt.artifact import write_bytes
from treeopt.errors import DocumentError

__all__ = ["CONFIG_NAME", "TENSOR_NAME", "WEIGHTS_NAME", "read_adapter", "write_adapter"]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
TENSOR_NAME = "prompt_embeddings"


def write_adapter(folder: Path, config: Mapping[str, object], flat: Tensor) -> None:
    """Write both files of an adapter folder, each under a temporary name that is then renamed.

    The configuration comes last, so an interrupted first save leaves no folder that loads.

    Parameters
    ----------
    folder : Path
        Made if missing.
    config : mapping
        Becomes ``adapter_config.json``.
    flat : Tensor, shape (rows, hidden)
        Becomes ``prompt_embeddings``.

    Raises
    ------
    DocumentError
        When the files cannot be written.
    """
    weights = safetensors.torch.save({TENSOR_NAME: flat}, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DocumentError(f"{folder}: cannot be made ({error.strerror or error}); choose another folder") from error
    write_bytes(weights, folder / WEIGHTS_NAME)
    write_bytes(text.encode("utf-8"), folder / CONFIG_NAME)


def read_adapter(folder: Path) -> tuple[dict[str, object], Tensor]:
    """Read both files of an adapter folder.

    Parameters
    ----------
    folder : Path
        Holds ``adapter_config.json`` and ``adapter_model.safetensors``; a pickled file is never opened.

    Returns
    -------
    config : dict
        The configuration.
    flat : Tensor, float32, shape (rows, hidden)
        The embeddings.

    Raises
    ------
    DocumentError
        When a file is missing or is not what it should be.
    """
    return _read_config(folder / CONFIG_NAME), _read_embeddings(folder)


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DocumentError(f"{path}: is missing; give the folder that holds the prompt tokens") from error
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path}: is not JSON ({error}); save the prompt tokens again") from error
    if not isinstance(config, dict):
        raise DocumentError(f"{path}: must hold a JSON object; save the prompt tokens again")
    return config


def _read_embeddings(folder: Path) -> Tensor:
    path = folder / WEIGHTS_NAME
    if not path.exists():
        pickled = folder / "adapter_model.bin"
        hint = (
            f"{pickled.name} is pickled and is never opened; convert it to safetensors"
            if pickled.exists()
            else ("give the folder that holds the prompt tokens")
        )
        raise DocumentError(f"{path}: is missing; {hint}")
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise DocumentError(f"{path}: is not a safetensors file ({error}); save or download it again") from error
    if set(tensors) != {TENSOR_NAME}:
        raise DocumentError(f"{path}: holds {sorted(tensors)}; prompt tokens have the one key {TENSOR_NAME}")
    flat = tensors[TENSOR_NAME]
    if flat.ndim != 2 or not flat.is_floating_point():
        raise DocumentError(
            f"{path}: {TENSOR_NAME} must be floats of the shape (m * EPTs, hidden), not {tuple(flat.shape)}"
        )
    return flat.float()
