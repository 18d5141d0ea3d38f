"""Loading: folders and GGUF files, what is refused and why, and a digest that names the base model."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ppd_runtime import kernels, native
from ppd_runtime.models import load_model, model_digest, wrap_model
from tests.ppd_runtime.tiny import FAMILIES, tiny_model
from treeopt.errors import ModelError


@pytest.fixture
def folder(tmp_path):
    """A tiny model and tokenizer, saved as transformers saves them."""
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_frozen_and_checked(folder):
    loaded = load_model(str(folder), device="cpu", kernels="own")
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, tiny_model(dtype=torch.float32)(ids).logits)
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert (loaded.name, loaded.dtype, loaded.device.type) == (str(folder), torch.float32, "cpu")
    assert (loaded.context_limit, loaded.kernels) == (128, "own")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_ids_to_tokens([7]) == ["w7"]


def test_progress_is_told(folder):
    told = []
    load_model(str(folder), device="cpu", kernels="own", progress=lambda what, share: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_kernels_are_applied_and_named(folder):
    loaded = load_model(str(folder), device="cpu", kernels="swap:2-4")
    assert loaded.kernels == kernels.planned_name(loaded.model) == "swap:2-4"
    assert wrap_model(loaded.model).kernels == kernels.planned_name(loaded.model) == "own"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_digest_names_the_base_model_in_any_dtype(family):
    digests = {
        model_digest(tiny_model(family, dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }
    assert len(digests) == 1
    assert digests != {model_digest(tiny_model(family, seed=1))}


def test_a_digest_notices_light_training_but_not_kernels():
    model = tiny_model(dtype=torch.float32)
    digest = model_digest(model)
    kernels.apply_plan(model, kernels.KernelPlan("swap:2-4"))
    assert model_digest(model) == digest
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=2e-3)
    assert model_digest(model) != digest


def test_digests_of_all_families_differ():
    """Llama and Mistral have the same weights here and differ by type."""
    assert len({model_digest(tiny_model(family)) for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "./no-such-folder"}, "no-such-folder"),
        ({"name": "absent.gguf"}, "no such file"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"device": "toaster"}, "device toaster"),
        ({"attention": "flash_attention_2"}, "flash_attention_2"),
        ({"kernels": "fast"}, "kernels 'fast'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(folder, changes, message):
    arguments = {"name": str(folder), "device": "cpu", "kernels": "own", **changes}
    with pytest.raises(ModelError, match=message) as caught:
        load_model(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_refused(folder):
    with pytest.raises(ModelError, match="no CUDA device"):
        load_model(str(folder), device="cuda")


def test_a_broken_folder_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelError, match=str(folder)):
        load_model(str(folder), device="cpu", kernels="own")


def test_capped_scores_get_eager_attention(folder):
    """Gemma 2 caps its attention scores, which fused attention cannot."""
    tiny_model("gemma2", dtype=torch.float32).save_pretrained(folder)
    assert load_model(str(folder), device="cpu", kernels="own").model.config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="attention auto or eager"):
        load_model(str(folder), device="cpu", kernels="own", attention="sdpa")


def test_the_self_check_can_be_left_out(monkeypatch):
    monkeypatch.setattr("ppd_runtime.models.check_takes_tree", None)
    wrap_model(tiny_model(), self_check=False)
    with pytest.raises(TypeError):
        wrap_model(tiny_model())


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_native_kernels_do_not_serve_float64():
    with pytest.raises(ModelError, match="float64"):
        wrap_model(tiny_model(), kernels="native:1-4")
