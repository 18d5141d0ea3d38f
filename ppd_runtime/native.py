"""The linear layer for a few rows in C, compiled once on the machine that runs it.

A step of 2 to 16 rows reads the same weights as a step of one; the libraries' matrix products take up to twice as long
for it, this kernel hardly longer (``data/few_rows.c`` says how). It needs a C compiler; where there is none, or the
compiled code gives other numbers than the library, it is unavailable and :func:`unavailable_reason` says why.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as own_linear

from ppd_runtime.demo_model import cache_folder

__all__ = ["linear", "processor", "unavailable_reason"]

SOURCE = Path(__file__).parent / "data" / "few_rows.c"
FUNCTIONS = {torch.float32: "linear_float", torch.bfloat16: "linear_bfloat16", torch.float16: "linear__Float16"}
"""Types of weights that the kernel takes; sums and inputs are float32 in all of them."""

MAX_ERROR = 1e-4
"""Largest difference from a float64 product, relative to its largest value, at which the kernel counts as right."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + bias`` of a few rows.

    Parameters
    ----------
    x : Tensor, shape (..., width)
        Rows on the CPU, in the type of the weights.
    weight : Tensor, shape (outputs, width)
        Contiguous, float32, bfloat16 or float16.
    bias : Tensor or None, shape (outputs,)
        Added to every row.

    Returns
    -------
    Tensor, shape (..., outputs)
        Equal to ``F.linear`` up to rounding; computed by it when a gradient is wanted.
    """
    if torch.compiler.is_compiling():
        return torch.ops.treeopt.few_rows(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return own_linear(x, weight, bias)
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, width = weight.shape
    rows = x.to(torch.float32).contiguous()
    out = rows.new_empty((*x.shape[:-1], outputs))
    offsets = None if bias is None else bias.to(torch.float32)
    _functions()[weight.dtype](
        rows.data_ptr(),
        weight.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        out.data_ptr(),
        rows.numel() // width,
        width,
        outputs,
        torch.get_num_threads(),
    )
    return out.to(x.dtype)


# What torch.compile sees instead of a pointer: an opaque call with a known shape.
@torch.library.custom_op("treeopt::few_rows", mutates_args=())
def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _linear(x, weight, bias)


@_few_rows.register_fake
def _few_rows_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def unavailable_reason() -> str | None:
    """Return why the kernel cannot be used on this machine; None when it can."""
    found = _load()
    return found if isinstance(found, str) else None


def _functions() -> dict[torch.dtype, "ctypes._NamedFuncPointer"]:
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(f"the few-row kernel is unavailable: {found}")
    return found


@lru_cache(maxsize=1)
def _load() -> dict[torch.dtype, "ctypes._NamedFuncPointer"] | str:
    """Compile, load and check the kernel; the reason as a text when that fails."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler (cc, gcc or clang) was found; install one to make small trees faster on the CPU"
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or ["no message"]
        return f"{compiler} could not compile {SOURCE.name}: {lines[0]}"
    except OSError as error:
        return f"the compiled kernel cannot be loaded: {error}"
    functions = {}
    for dtype, name in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        function.restype = None
        functions[dtype] = function
    return _mismatch(functions) or functions


def _compiled(compiler: str) -> Path:
    """Return the compiled kernel for this processor, from the cache or made now."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join([SOURCE.read_text(encoding="utf-8"), version, processor()])
    target = cache_folder() / "native" / f"few_rows-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        compiled, linked = Path(name) / "few_rows.o", Path(name) / target.name
        # The source names its vectors itself: a compiler that looks for more takes three times as long for nothing.
        flags = ["-O2", "-fno-tree-vectorize", "-march=native", "-fopenmp", "-fPIC", "-c"]
        subprocess.run([compiler, *flags, "-o", compiled, SOURCE], capture_output=True, text=True, check=True)
        # Linked without an OpenMP library: the symbols resolve to the one that torch has loaded, so that both work
        # with the same pool of threads. A second pool would fight the first for the cores.
        subprocess.run([compiler, "-shared", "-o", linked, compiled], capture_output=True, text=True, check=True)
        linked.replace(target)
    return target


def processor() -> str:
    """Name the instruction set: code for one processor may not run on another that shares the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.system()} {platform.machine()} {flags}"


def _mismatch(functions: dict[torch.dtype, "ctypes._NamedFuncPointer"]) -> str | None:
    """Compare the kernel with exact products, in shapes that leave remainders everywhere."""
    generator = torch.Generator().manual_seed(0)
    for dtype, function in functions.items():
        for rows in (1, 3, 8, 11):
            x = torch.randn(rows, 83, generator=generator)
            weight = torch.randn(20, 83, generator=generator).to(dtype)
            out = torch.empty(rows, 20)
            function(x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), rows, 83, 20, torch.get_num_threads())
            exact = x.double() @ weight.double().T
            if not (out - exact).abs().max() <= MAX_ERROR * exact.abs().max():
                return f"the compiled kernel is wrong for {rows} rows in {dtype}"
    return None
