"""A KV cache written in place and compacted after every pass.

A pass appends the keys and values of a whole tree; verification keeps a few of them. transformers' own caches
concatenate on every call, which copies the text so far for each step. Here the rows live in one buffer per layer:

==========  ===================================================================================
committed   columns ``0 .. lengths[b]-1`` of batch row ``b``: the text, in order, nothing else
window      columns ``start .. end-1``: the rows of the pass that is running, the same for every ``b``
stale       whatever lies between; the mask hides it and the next pass overwrites it
==========  ===================================================================================

``open`` -> forward (every layer calls ``update``) -> ``commit``. No step costs more because the text is longer.

A *dynamic* cache returns the used columns and doubles its buffers when they are full. A *static* cache returns its
whole buffers every time and writes through a tensor of column numbers: shapes and addresses never change, which is
what ``torch.compile`` and CUDA graphs need.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from treeopt.errors import DecodeError

__all__ = ["TreeCache"]


class _Window:
    """The columns that the running pass writes, shared by all layers."""

    __slots__ = ("columns", "end", "start")

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.columns: Tensor | None = None


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, shape ``[batch, heads, capacity, head_dim]`` each."""

    is_sliding = False
    is_croppable = False

    def __init__(self, window: _Window, capacity: int, static: bool) -> None:
        super().__init__()
        self.window = window
        self.capacity = capacity
        self.static = static
        self.is_compileable = static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # A static cache hands out columns that were never written. They are masked, but 0 * nan is nan, so they are
        # zeroed; a dynamic cache hands out written columns only.
        new = torch.Tensor.new_zeros if self.static else torch.Tensor.new_empty
        self.keys = new(key_states, (*key_states.shape[:2], self.capacity, key_states.shape[3]))
        self.values = new(value_states, (*value_states.shape[:2], self.capacity, value_states.shape[3]))
        if self.static:
            torch._dynamo.mark_static_address(self.keys)
            torch._dynamo.mark_static_address(self.values)
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the rows of the pass and return all columns that it may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.static:
            self.keys.index_copy_(2, self.window.columns, key_states)
            self.values.index_copy_(2, self.window.columns, value_states)
            return self.keys, self.values
        start, end = self.window.start, self.window.end
        if end > self.keys.shape[2]:
            self.capacity = max(end, 2 * self.keys.shape[2])
            self.keys = _grown(self.keys, self.capacity, start)
            self.values = _grown(self.values, self.capacity, start)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.capacity if self.static else self.window.start + query_length), 0

    def get_seq_length(self) -> int:
        return self.window.start

    def get_max_length(self) -> int:
        return self.capacity if self.static else -1


def _grown(states: Tensor, capacity: int, used: int) -> Tensor:
    grown = states.new_empty((*states.shape[:2], capacity, states.shape[3]))
    grown[:, :, :used] = states[:, :, :used]
    return grown


class TreeCache(Cache):
    """KV cache of a batch of texts, each with its own length.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    batch_size : int
        Texts decoded together.
    capacity : int
        Columns to allocate, tokens: a first guess when dynamic, a hard limit when static.
    device : torch.device
        Where the masks live; keys and values follow the model.
    static : bool
        Keep every shape and address constant.

    Attributes
    ----------
    lengths : list of int
        Committed tokens per batch row.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | None = None,
        static: bool = False,
    ) -> None:
        self._window = _Window()
        super().__init__(layers=[_Layer(self._window, capacity, static) for _ in range(num_layers)])
        self.static = static
        self.capacity = capacity
        self.device = torch.device("cpu") if device is None else device
        self.lengths = [0] * batch_size
        # Row q of a pass may attend to everything committed and to what its tree allows. What is committed changes by
        # a few columns a step, so the mask is kept and edited, not rebuilt: [batch, 1, rows, columns].
        self._mask = torch.zeros((batch_size, 1, 0, capacity), dtype=torch.bool, device=self.device)
        self._column_buffers: dict[int, Tensor] = {}

    @property
    def start(self) -> int:
        """First column free in every batch row."""
        return max(self.lengths)

    def open(self, num_rows: int, *, start: int | None = None) -> int:
        """Choose the columns of the next pass and return how many columns its mask must have.

        Parameters
        ----------
        num_rows : int
            Rows of the pass.
        start : int, optional
            First column, right after the longest text by default; prefill in chunks says where it is.

        Returns
        -------
        int
            Columns that every layer's ``update`` will return.

        Raises
        ------
        DecodeError
            When a static cache is full.
        """
        window = self._window
        window.start = self.start if start is None else start
        window.end = window.start + num_rows
        if not self.static:
            return window.end
        if window.end > self.capacity:
            raise DecodeError(
                f"static cache: holds {self.capacity} tokens, this pass needs {window.end}; raise the capacity or use "
                "the dynamic cache"
            )
        # One buffer per number of rows, refilled: a captured graph keeps reading the same address.
        if num_rows not in self._column_buffers:
            self._column_buffers[num_rows] = torch.empty(num_rows, dtype=torch.long, device=self.device)
        window.columns = self._column_buffers[num_rows]
        torch.arange(window.start, window.end, out=window.columns)
        return self.capacity

    def pass_mask(self, allowed: Tensor) -> Tensor:
        """Return the mask of the open pass.

        Parameters
        ----------
        allowed : BoolTensor, shape (batch, q, q)
            Which row of the pass may attend to which.

        Returns
        -------
        BoolTensor, shape (batch, 1, q, columns)
            May be a view that the next pass edits again: use it before then. Committed columns are allowed, stale ones
            not.
        """
        start, end = self._window.start, self._window.end
        self._reserve_mask(end - start, end)
        self._mask[:, 0, : end - start, start:end] = allowed
        if not self.static:
            return self._mask[:, :, : end - start, :end]
        # Compiled code is bound to strides, and a view's depend on the largest pass so far.
        return self._mask[:, :, : end - start, : self.capacity].clone(memory_format=torch.contiguous_format)

    def _reserve_mask(self, num_rows: int, num_columns: int) -> None:
        batch_size, _, rows, columns = self._mask.shape
        if num_rows <= rows and num_columns <= columns:
            return
        columns = columns if num_columns <= columns else max(num_columns, 2 * columns)
        self._mask = torch.zeros((batch_size, 1, max(rows, num_rows), columns), dtype=torch.bool, device=self.device)
        for b, length in enumerate(self.lengths):
            self._mask[b, :, :, :length] = True

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep some rows of the pass, in order, and forget the others.

        Parameters
        ----------
        kept : sequence of sequence of int, one per batch row
            Rows of the pass, counted from 0, that continue each text.

        Notes
        -----
        Kept rows move to the end of their text; those already there stay. The cost is that of the moved rows.
        """
        start, end = self._window.start, self._window.end
        batch_rows: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        self._mask[:, :, :, start:end] = False
        for b, rows in enumerate(kept):
            length = self.lengths[b]
            for i, row in enumerate(rows):
                if start + row != length + i:
                    batch_rows.append(b)
                    sources.append(start + row)
                    targets.append(length + i)
            self.lengths[b] = length + len(rows)
            self._mask[b, :, :, length : self.lengths[b]] = True
        if sources:
            self._move(batch_rows, sources, targets)

    def _move(self, batch_rows: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy columns ``sources`` to ``targets``; all are read before any is written."""
        if len(self.lengths) == 1:
            source = torch.tensor(sources, device=self.device)
            target = torch.tensor(targets, device=self.device)
            for layer in self.layers:
                layer.keys.index_copy_(2, target, layer.keys.index_select(2, source))
                layer.values.index_copy_(2, target, layer.values.index_select(2, source))
            return
        b, source, target = (torch.tensor(each, device=self.device) for each in (batch_rows, sources, targets))
        for layer in self.layers:
            layer.keys[b, :, target] = layer.keys[b, :, source]
            layer.values[b, :, target] = layer.values[b, :, source]

    def settle(self, lengths: Sequence[int]) -> None:
        """Declare the first columns of each batch row committed: the end of prefill."""
        self.lengths = list(lengths)
        self._mask.fill_(False)
        for b, length in enumerate(self.lengths):
            self._mask[b, :, :, :length] = True

    def discard(self) -> None:
        """Zero all that is not committed: it held values that are not finite, and masks do not stop those (0 * nan)."""
        for b, length in enumerate(self.lengths):
            for layer in self.layers:
                layer.keys[b, :, length:] = 0
                layer.values[b, :, length:] = 0

    def keep_batch_rows(self, batch_rows: Sequence[int]) -> None:
        """Drop the batch rows of texts that have ended."""
        index = torch.tensor(list(batch_rows), device=self.device)
        self.lengths = [self.lengths[b] for b in batch_rows]
        self._mask = self._mask.index_select(0, index)
        for layer in self.layers:
            layer.keys = layer.keys.index_select(0, index)
            layer.values = layer.values.index_select(0, index)

    def committed(self, layer_idx: int, batch_row: int = 0) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one text, shape ``[heads, length, head_dim]`` each."""
        layer, length = self.layers[layer_idx], self.lengths[batch_row]
        return layer.keys[batch_row, :, :length], layer.values[batch_row, :, :length]
