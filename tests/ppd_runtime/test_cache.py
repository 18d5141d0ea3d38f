import pytest
import torch

from ppd_runtime.cache import TreeCache
from treeopt.errors import DecodeError

HEADS, HEAD_DIM = 2, 3


def rows_of(batch: int, count: int, first: int = 0) -> torch.Tensor:
    """Rows that say who they are: the value is 100 b + first + row."""
    numbers = 100.0 * torch.arange(batch)[:, None] + first + torch.arange(count)
    return numbers[:, None, :, None].expand(batch, HEADS, count, HEAD_DIM).contiguous()


def write(cache: TreeCache, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache.open(states.shape[2])
    for layer in range(2):
        keys, values = cache.update(states + layer, -states - layer, layer)
    return keys, values


def committed(cache: TreeCache, row: int) -> list[float]:
    keys, values = cache.committed(1, row)
    assert torch.equal(keys, -values)
    return (keys[0, :, 0] - 1).tolist()


@pytest.mark.parametrize("static", [False, True])
def test_commit_keeps_the_named_rows_in_order_per_batch_row(static: bool) -> None:
    cache = TreeCache(2, 2, 16, static=static)
    write(cache, rows_of(2, 3))
    cache.settle([3, 1])
    write(cache, rows_of(2, 5, first=10))
    cache.commit([[0, 2, 4], [0, 1]])
    assert committed(cache, 0) == [0, 1, 2, 10, 12, 14]
    assert committed(cache, 1) == [100, 110, 111]
    write(cache, rows_of(2, 2, first=20))
    cache.commit([[1], [0, 1]])
    assert committed(cache, 0) == [0, 1, 2, 10, 12, 14, 21]
    assert committed(cache, 1) == [100, 110, 111, 120, 121]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dynamic_cache_grows_without_losing_anything(batch: int) -> None:
    cache = TreeCache(2, batch, 2)
    expected = []
    for step in range(20):
        write(cache, rows_of(batch, 4, first=10 * step))
        cache.commit([[0, 3]] * batch)
        expected += [10.0 * step, 10.0 * step + 3]
    for b in range(batch):
        assert committed(cache, b) == [100 * b + each for each in expected]


def test_passes_write_in_place_until_the_buffer_is_full() -> None:
    cache = TreeCache(2, 1, 64)
    write(cache, rows_of(1, 4))
    address = cache.layers[1].keys.data_ptr()
    for _ in range(15):
        cache.commit([[0, 2, 3]])
        keys, _ = write(cache, rows_of(1, 4))
        assert keys.data_ptr() == address


def test_a_static_cache_returns_the_same_whole_buffer_every_time() -> None:
    cache = TreeCache(2, 1, 12, static=True)
    first = [each.data_ptr() for each in write(cache, rows_of(1, 3))]
    cache.commit([[0, 2]])
    keys, values = write(cache, rows_of(1, 3))
    assert [keys.data_ptr(), values.data_ptr()] == first
    assert keys.shape[2] == 12
    columns = cache._column_buffers[3].data_ptr()
    cache.commit([[0]])
    write(cache, rows_of(1, 3))
    assert cache._column_buffers[3].data_ptr() == columns


def test_a_full_static_cache_is_refused_with_the_remedy() -> None:
    cache = TreeCache(2, 1, 4, static=True)
    write(cache, rows_of(1, 3))
    cache.commit([[0, 1, 2]])
    with pytest.raises(DecodeError, match=r"holds 4 tokens, this pass needs 5; raise the capacity or use the dynamic"):
        cache.open(2)


@pytest.mark.parametrize("static", [False, True])
def test_the_mask_shows_the_own_text_and_the_tree_and_nothing_else(static: bool) -> None:
    cache = TreeCache(2, 2, 24, static=static)
    write(cache, rows_of(2, 4))
    cache.settle([4, 2])
    for step in range(4):
        q = 3 + step % 2
        columns = cache.open(q)
        tree = torch.rand(2, q, q) < 0.5
        start = cache.start
        expected = torch.zeros(2, 1, q, columns, dtype=torch.bool)
        for b in range(2):
            expected[b, :, :, : cache.lengths[b]] = True
            expected[b, 0, :, start : start + q] = tree[b]
        assert torch.equal(cache.pass_mask(tree), expected)
        for layer in range(2):
            cache.update(rows_of(2, q), rows_of(2, q), layer)
        cache.commit([[0, 2], [0]])


def test_ended_texts_are_dropped_with_their_masks() -> None:
    cache = TreeCache(2, 3, 8)
    write(cache, rows_of(3, 2))
    cache.settle([2, 1, 2])
    cache.keep_batch_rows([0, 2])
    assert cache.lengths == [2, 2]
    assert committed(cache, 1) == [200, 201]
    assert cache.open(1) == 3
    assert cache.pass_mask(torch.ones(2, 1, 1, dtype=torch.bool)).all()


def test_discard_leaves_only_the_text() -> None:
    cache = TreeCache(2, 2, 8)
    write(cache, rows_of(2, 2))
    cache.settle([2, 1])
    write(cache, torch.full((2, HEADS, 3, HEAD_DIM), torch.nan))
    cache.discard()
    assert committed(cache, 0) == [0, 1]
    assert committed(cache, 1) == [100]
    for layer in cache.layers:
        assert torch.isfinite(layer.keys[:, :, :5]).all()
        assert torch.isfinite(layer.values[:, :, :5]).all()


def test_a_static_masks_strides_do_not_depend_on_earlier_passes() -> None:
    cache = TreeCache(1, 1, 16, static=True)
    strides = []
    for num_rows in (2, 5, 2):
        cache.open(num_rows, start=0)
        mask = cache.pass_mask(torch.eye(num_rows, dtype=torch.bool)[None])
        assert mask.shape == (1, 1, num_rows, 16)
        strides.append(mask.stride())
    assert strides[0] == strides[2]
