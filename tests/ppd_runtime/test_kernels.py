"""Kernel plans: every routine is exact, names say what runs, and a choice is measured once and remembered."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ppd_runtime import fused, hf, kernels, native
from ppd_runtime.kernels import KernelPlan, PlannedLinear, apply_plan, choose_plan, planned_name, remove_plan
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import ModelError

NATIVE_REASON = native.unavailable_reason()
needs_native = pytest.mark.skipif(NATIVE_REASON is not None, reason=str(NATIVE_REASON))
ROUTINES = [name for name in kernels.ROUTINES if name != "native" or NATIVE_REASON is None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_routines_equal_the_exact_product(routine, dtype, bias):
    """Widths and outputs with remainders of every block, row counts on both sides of the kernel's tiles."""
    generator = torch.Generator().manual_seed(0)
    for width, outputs in ((576, 192), (37, 50), (7, 2), (64, 1)):
        weight = torch.randn(outputs, width, generator=generator).to(dtype)
        offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        for rows in (1, 2, 3, 5, 8, 9, 16, 17):
            x = torch.randn(1, rows, width, generator=generator).to(dtype)
            exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
            found = kernels.ROUTINES[routine](x, weight, offset)
            assert found.dtype == dtype
            assert found.shape == (1, rows, outputs)
            tolerance = 4 * torch.finfo(dtype).eps * width**0.5
            assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1)


@needs_native
def test_native_rows_do_not_depend_on_their_number():
    weight, x = torch.randn(50, 83), torch.randn(13, 83)
    together = native.linear(x, weight, None)
    for row in range(13):
        assert torch.equal(native.linear(x[row : row + 1], weight, None)[0], together[row])


@needs_native
def test_native_keeps_what_is_not_a_number():
    weight, x = torch.randn(9, 32), torch.randn(3, 32)
    x[1, 4] = torch.nan
    x[2, 5] = torch.inf
    found = native.linear(x, weight, None)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


@needs_native
def test_gradients_flow_through_the_librarys_routine():
    weight = torch.randn(9, 32)
    x = torch.randn(3, 32, requires_grad=True)
    native.linear(x, weight, None).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 32))


def test_without_a_compiler_the_reason_is_given(monkeypatch):
    native._load.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    try:
        assert "no C compiler" in native.unavailable_reason()
        with pytest.raises(ModelError, match="no C compiler"):
            apply_plan(tiny_model(dtype=torch.float32), KernelPlan("native:1-4"))
    finally:
        native._load.cache_clear()


@needs_native
def test_a_broken_compiler_is_reported_and_leaves_nothing_behind(cache, monkeypatch):
    native._load.cache_clear()
    source = cache / "few_rows.c"
    source.write_text("this is not C")
    monkeypatch.setattr(native, "SOURCE", source)
    try:
        assert "could not compile few_rows.c" in native.unavailable_reason()
        assert list((cache / "native").iterdir()) == []
    finally:
        native._load.cache_clear()


@needs_native
def test_a_kernel_that_computes_something_else_is_not_used(cache, monkeypatch):
    native._load.cache_clear()
    source = cache / "few_rows.c"
    right = native.SOURCE.read_text()
    source.write_text(right.replace("sum[r][b] += a[b] * c", "sum[r][b] += a[b] * c * 1.01f"))
    assert source.read_text() != right
    monkeypatch.setattr(native, "SOURCE", source)
    try:
        assert "is wrong" in native.unavailable_reason()
    finally:
        native._load.cache_clear()


@given(
    st.lists(st.sampled_from(list(kernels.ROUTINES)), min_size=1, max_size=60),
    st.sampled_from([(), ("gqa",), ("rms",), ("gqa", "rms")]),
)
def test_a_name_says_the_whole_plan(routines, operations):
    routines[0] = "own"
    plan = KernelPlan.from_routines(routines, operations)
    assert KernelPlan(plan.name) == plan
    assert plan.fused == operations
    table = list(plan.routines)
    assert table + ["own"] * (len(routines) - len(table)) == routines


@pytest.mark.parametrize(
    "name",
    ["", "fast", "swap", "swap:0-3", "swap:5-3", "swap:1-4,native:4-8", "own:1-2,", "auto", "rms,gqa", "swap:2-4,gqa"],
)
def test_other_names_are_refused(name):
    with pytest.raises(ModelError, match="kernels"):
        KernelPlan(name)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "phi", "opt"])
def test_a_plan_changes_no_logits_and_no_weights(family):
    model = tiny_model(family, dtype=torch.float32)
    ids = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(0))
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    own = model(ids).logits
    plan = KernelPlan("swap:2-9,native:10-12" if NATIVE_REASON is None else "swap:2-12")
    apply_plan(model, plan)
    assert planned_name(model) == plan.name
    assert type(model.lm_head) is PlannedLinear, "the head takes part"
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights, "no hidden copies"
    for rows in (ids[:1, :1], ids[:1], ids):
        torch.testing.assert_close(model(rows).logits, own[: len(rows), : rows.shape[1]], rtol=0, atol=2e-5)
    remove_plan(model)
    assert planned_name(model) == "own"
    assert not any(type(module) is PlannedLinear for module in model.modules())
    assert torch.equal(model(ids).logits, own)


def test_the_routine_follows_the_number_of_rows(monkeypatch):
    called = []

    def spy(x, weight, bias):
        called.append(x.numel() // x.shape[-1])
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setitem(kernels.ROUTINES, "swap", spy)
    model = nn.Sequential(nn.Linear(4, 4))
    apply_plan(model, KernelPlan("swap:2-3"))
    for shape in ((1, 1, 4), (1, 2, 4), (3, 1, 4), (2, 2, 4)):
        model(torch.zeros(shape))
    assert called == [2, 3]


def test_a_choice_is_measured_once_and_remembered(cache, monkeypatch):
    rows = kernels.MEASURED_ROWS
    seconds = {"own": dict.fromkeys(rows, 1.0), "swap": {n: 0.5 if 2 <= n <= 4 else 2.0 for n in rows}}
    asked = []

    def measured(layers, routines):
        asked.append(routines)
        return seconds

    monkeypatch.setattr(kernels, "measure_routines", measured)
    model = tiny_model("gpt-neox", dtype=torch.float32)
    assert choose_plan(model).name == "swap:2-4"
    assert choose_plan(model).name == "swap:2-4"
    assert len(asked) == 1
    (path,) = (cache / "kernels").iterdir()
    assert json.loads(path.read_text())["threads"] == torch.get_num_threads()
    path.write_text("{")  # cut short: measured again
    assert choose_plan(model).name == "swap:2-4"
    assert len(asked) == 2
    assert choose_plan(tiny_model("gpt-neox", dtype=torch.bfloat16)).name == "swap:2-4"
    assert len(asked) == 3, "another type is another choice"
    assert choose_plan(tiny_model("gpt-neox", dtype=torch.float64)).name == "own"
    assert len(asked) == 3


def test_every_routine_is_measured_at_every_row_count():
    layers = [module for module in tiny_model(dtype=torch.float32).modules() if type(module) is nn.Linear]
    seconds = kernels.measure_routines(layers, ROUTINES)
    assert set(seconds) == set(ROUTINES)
    for times in seconds.values():
        assert tuple(times) == kernels.MEASURED_ROWS
        assert all(value > 0 for value in times.values())


def test_noise_does_not_choose():
    seconds = {"own": {1: 1.0, 2: 1.0, 3: 1.0}, "swap": {1: 0.99, 2: 0.9, 3: 1.0}, "native": {1: 1.01, 2: 1.1, 3: 0.8}}
    assert kernels.plan_from_seconds(seconds).name == "native:1-1,swap:2-2,native:3-3"


@pytest.mark.parametrize(
    ("family", "dtype", "expected"),
    [
        ("llama", torch.float32, ("gqa", "rms")),
        ("llama", torch.bfloat16, ("gqa",)),
        ("qwen3", torch.float32, ("gqa", "rms")),
        ("gemma", torch.float32, ("gqa",)),  # its norms add 1 to their weights
        ("gemma2", torch.float32, ()),  # eager attention
        ("gpt-neox", torch.float32, ()),  # every query head has its own keys
        ("gpt2", torch.float32, ()),
    ],
)
def test_fused_operations_are_used_where_they_compute_the_same(family, dtype, expected):
    model = tiny_model(family, dtype=dtype)
    assert fused.usable(model) == expected
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    own, classes = rows_of(model, ids), [type(module) for module in model.modules()]
    fused.apply(model, expected)
    assert fused.applied(model) == expected
    # Row by row attention is the same arithmetic; norms round alike in float32.
    torch.testing.assert_close(rows_of(model, ids), own, rtol=0, atol=5e-6 if "rms" in expected else 0)
    fused.remove(model)
    assert fused.applied(model) == ()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(rows_of(model, ids), own)


def rows_of(model, ids):
    """Logits of a tree: two branches below the third token."""
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[6:, 3:6] = False
    with torch.inference_mode():
        return hf.forward_rows(
            model,
            inputs_embeds=hf.embed_tokens(model, ids),
            mask=mask[None, None],
            position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5]]),
            cache=None,
        )


def test_shared_keys_keep_the_models_own_generation_right():
    """Left padding needs a mask, which transformers builds only for attention that it knows."""
    model = tiny_model(dtype=torch.float32)
    ids, padding = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    own = model.generate(ids, attention_mask=padding, max_new_tokens=6, do_sample=False)
    apply_plan(model, KernelPlan("gqa"))
    assert torch.equal(model.generate(ids, attention_mask=padding, max_new_tokens=6, do_sample=False), own)
    assert hf.attention_backend(model) == "sdpa"


def test_fused_operations_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match="no use for gqa"):
        apply_plan(tiny_model("gpt2", dtype=torch.float32), KernelPlan("gqa"))
