"""The environment a curve was measured in: driver and library versions, all found without importing them."""

import ast
import contextlib
import importlib.util
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from profiler.nvidia import driver_version

__all__ = ["environment", "torch_build"]


@lru_cache(maxsize=1)
def _torch_build() -> tuple[tuple[str, str], ...]:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return ()
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ()
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = value.value
    return tuple(found.items())


def torch_build() -> Mapping[str, str]:
    """Return ``version``, ``cuda`` and ``hip`` of the installed torch, as far as it was built with them.

    The file that torch keeps them in is parsed, not imported: importing torch takes seconds.
    """
    facts = dict(_torch_build())
    return {
        name: facts[key] for name, key in (("version", "__version__"), ("cuda", "cuda"), ("hip", "hip")) if key in facts
    }


def environment(kind: str) -> dict[str, str]:
    """Return the versions that matter to a step's latency on a device of this kind.

    Parameters
    ----------
    kind : {"cpu", "cuda", "rocm", "mps"}
        As in `profiler.device.DeviceIdentity`.
    """
    build = torch_build()
    found = {"python": platform.python_version(), "os": f"{platform.system()} {platform.release()}"}
    if "version" in build:
        found["torch"] = build["version"]
    with contextlib.suppress(PackageNotFoundError):  # a bare model needs none
        found["transformers"] = version("transformers")
    if kind == "cuda":
        found["driver"] = driver_version()
        if "cuda" in build:
            found["cuda"] = build["cuda"]
    elif kind == "rocm":
        found["driver"] = _amd_driver()
        if "hip" in build:
            found["hip"] = build["hip"]
    return found


def _amd_driver() -> str:
    path = Path("/sys/module/amdgpu/version")
    return path.read_text(encoding="utf-8").strip() if path.exists() else f"kernel {platform.release()}"
