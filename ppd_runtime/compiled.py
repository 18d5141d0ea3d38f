"""Passes compiled by torch.compile: most of a small model's step on a CPU that is not matrix products disappears.

Needs fixed shapes, so the static cache. Every number of rows of a pass is compiled once, in a minute or two; inductor
keeps the result on disk, so the next process only loads it. Designs whose states share one pass size need one shape.
The prompt runs uncompiled: its length is never the same twice.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime import hf
from ppd_runtime.graphs import Forward
from treeopt.errors import DecodeError

__all__ = ["CAPACITY_STEP", "compiled_forward", "rounded_capacity"]

BACKEND = "inductor"

CAPACITY_STEP = 512
"""Compiled caches have a multiple of this many columns: every other capacity would be another shape to compile."""

MAX_COMPILED_SHAPES = 128
"""Past its own, lower limit dynamo would quietly run uncompiled."""


def compiled_forward() -> Forward:
    """Return `ppd_runtime.hf.forward_rows`, compiled for every shape it meets.

    Raises
    ------
    DecodeError
        From the returned function, when a pass cannot be compiled here.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILED_SHAPES)
    compiled = torch.compile(hf.forward_rows, dynamic=False, backend=BACKEND)

    def forward(model: PreTrainedModel, **inputs: object) -> Tensor:
        try:
            return compiled(model, **inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DecodeError(
                f"torch.compile: {reason}; install what it asks for (on a CPU a C++ compiler), or run uncompiled"
            ) from error

    return forward


def rounded_capacity(num_columns: int) -> int:
    """Return the columns to allocate.

    Examples
    --------
    >>> rounded_capacity(1), rounded_capacity(513)
    (512, 1024)
    """
    return -(-num_columns // CAPACITY_STEP) * CAPACITY_STEP
