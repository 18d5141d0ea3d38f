"""A captured CUDA graph per pass shape.

A small model's step on a GPU is mostly the launching of kernels. With a static cache every pass of one state has the
same shapes and addresses, so its launches can be recorded once and replayed as one.

Untested on hardware: written without a GPU at hand. What can be checked on a CPU (buffers, keys, replay with fresh
inputs) is, with a stand-in for the capture; off unless asked for (``cache="graph"``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime import hf
from ppd_runtime.cache import TreeCache
from treeopt.errors import DecodeError

__all__ = ["Capture", "Forward", "GraphedForward", "capture_cuda_graph"]

Forward = Callable[..., Tensor]
"""Called like `ppd_runtime.hf.forward_rows`."""

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a call; returns what replays it and the tensor that every replay writes."""

WARM_UP_CALLS = 3
"""Eager calls before the capture, for libraries that allocate and choose kernels when first used."""


def capture_cuda_graph(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """One recorded pass: fill the inputs, replay, read the output."""

    embeddings: Tensor
    mask: Tensor
    positions: Tensor
    replay: Callable[[], None]
    output: Tensor


class GraphedForward:
    """Runs passes from recorded graphs, recording each shape when it first comes.

    Belongs to one `TreeCache`: the graphs hold its addresses. The returned logits are overwritten by the next replay of
    the same shape.

    Parameters
    ----------
    capture : callable
        How a call is recorded; a CUDA graph, or a stand-in in tests.

    Raises
    ------
    DecodeError
        When called with a cache that is not static, or when the model cannot be recorded.
    """

    def __init__(self, capture: Capture = capture_cuda_graph) -> None:
        self._capture = capture
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def __call__(
        self,
        model: PreTrainedModel,
        *,
        inputs_embeds: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        cache: TreeCache,
        rows: Tensor,
    ) -> Tensor:
        """Run one pass; see `ppd_runtime.hf.forward_rows`."""
        if not cache.static:
            raise DecodeError("CUDA graphs: need the static cache; use cache graph or static")
        key = (inputs_embeds.shape, mask.shape, len(rows))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._record(model, inputs_embeds, mask, position_ids, cache, rows)
            self._graphs[key] = graph
        graph.embeddings.copy_(inputs_embeds)
        graph.mask.copy_(mask)
        graph.positions.copy_(position_ids)
        graph.replay()
        return graph.output

    def _record(
        self,
        model: PreTrainedModel,
        inputs_embeds: Tensor,
        mask: Tensor,
        position_ids: Tensor,
        cache: TreeCache,
        rows: Tensor,
    ) -> _Graph:
        # Copies: the graph reads these addresses for ever. Recording writes the pass's own columns of the cache, which
        # the replay that follows writes again.
        embeddings, mask, positions, rows = (
            each.clone(memory_format=torch.contiguous_format) for each in (inputs_embeds, mask, position_ids, rows)
        )

        def call() -> Tensor:
            return hf.forward_rows(
                model, inputs_embeds=embeddings, mask=mask, position_ids=positions, cache=cache, rows=rows
            )

        try:
            replay, output = self._capture(call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise DecodeError(
                f"CUDA graphs: {type(model).__name__} cannot be captured ({reason}); use cache dynamic"
            ) from error
        return _Graph(embeddings, mask, positions, replay, output)
