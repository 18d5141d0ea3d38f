"""All groups in one pass give what one group at a time gives, and what a decoder would see."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from ppd_runtime import hf
from ppd_runtime.groups import group_attention, group_logits, group_mask, text_pass
from ppd_runtime.prompt_tokens import prompt_visibility, random_prompt_tokens
from tests.ppd_runtime.tiny import FAMILIES, tiny_model

TEXT = torch.tensor([3, 17, 4, 4, 29, 8, 55, 1, 12, 30, 6])


def naive_logits(model: torch.nn.Module, embeddings: Tensor, text: Tensor, insertion: int, mask: str) -> Tensor:
    """Run one group after one token, without a cache: text and group as one sequence under an explicit mask."""
    m, num_epts, hidden = embeddings.shape
    num_text, size = insertion + 1, m * num_epts
    rows = torch.cat([model.get_input_embeddings()(text[:num_text]), embeddings.reshape(size, hidden).double()])
    if model.config.model_type.startswith("gemma3"):
        rows[:num_text] = hf.embed_tokens(model, text[:num_text])
    allowed = torch.zeros(num_text + size, num_text + size, dtype=torch.bool)
    allowed[:num_text, :num_text] = torch.ones(num_text, num_text).tril().bool()
    allowed[num_text:, :num_text] = True
    allowed[num_text:, num_text:] = prompt_visibility(m, num_epts, mask)
    positions = torch.cat([torch.arange(num_text), insertion + 1 + torch.arange(size) // num_epts])
    logits = hf.forward_rows(
        model, inputs_embeds=rows[None], mask=allowed[None, None], position_ids=positions[None], cache=None
    )[0, num_text:]
    return logits.reshape(m, num_epts, -1).mean(dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_equals_one_group_at_a_time(family: str) -> None:
    model = tiny_model(family)
    embeddings = random_prompt_tokens(hf.embedding_size(model), 3, std=0.5, seed=2).embeddings
    insertions = torch.tensor([0, 1, 4, 5, 9])
    memory, _ = text_pass(model, TEXT, slice(-1, None))
    together = group_logits(model, embeddings, memory, insertions)
    for group, insertion in enumerate(insertions.tolist()):
        alone = naive_logits(model, embeddings, TEXT, insertion, "ensemble")
        # Eager attention takes its softmax in float32 whatever the model computes in.
        tolerance = 1e-9 if hf.attention_backend(model) == "sdpa" else 1e-5
        torch.testing.assert_close(together[group], alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mask", ["ensemble", "decoder", "encoder"])
@pytest.mark.parametrize("num_epts", [2, 3])
def test_ensembles_average_logits_under_every_mask(num_epts: int, mask: str) -> None:
    model = tiny_model("llama")
    embeddings = random_prompt_tokens(32, 2, num_epts, std=0.5, seed=3).embeddings
    insertions = torch.tensor([2, 7])
    memory, _ = text_pass(model, TEXT, slice(-1, None))
    together = group_logits(model, embeddings, memory, insertions, mask)
    for group, insertion in enumerate(insertions.tolist()):
        alone = naive_logits(model, embeddings, TEXT, insertion, mask)
        torch.testing.assert_close(together[group], alone, rtol=0, atol=1e-9)


def test_the_ensemble_mask_holds_independent_guessers() -> None:
    model = tiny_model("llama")
    embeddings = random_prompt_tokens(32, 3, 2, std=0.5, seed=4).embeddings
    memory, _ = text_pass(model, TEXT, slice(-1, None))
    insertions = torch.tensor([5])
    both = group_logits(model, embeddings, memory, insertions, "ensemble")
    apart = [group_logits(model, embeddings[:, i : i + 1], memory, insertions) for i in range(2)]
    torch.testing.assert_close(both, (apart[0] + apart[1]) / 2, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt2"])
@pytest.mark.parametrize(("num_epts", "mask"), [(1, "ensemble"), (2, "decoder")])
def test_the_faster_attention_changes_neither_logits_nor_gradients(family: str, num_epts: int, mask: str) -> None:
    model = tiny_model(family)
    insertions = torch.tensor([1, 3, 4, 8])
    start = random_prompt_tokens(hf.embedding_size(model), 3, num_epts, std=0.5, seed=5).embeddings
    results = []
    for fast in (False, True):
        embeddings = start.clone().requires_grad_(True)
        with group_attention(model, 3 * num_epts) if fast else nullcontext(False) as is_fast:
            assert is_fast is fast
            memory, own = text_pass(model, TEXT, slice(2, None))
            logits = group_logits(model, embeddings, memory, insertions, mask)
            logits.square().sum().backward()
        assert hf.attention_backend(model) == "sdpa"
        results.append((own, logits.detach(), embeddings.grad))
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-6, atol=1e-6)


def test_models_with_sliding_windows_keep_their_own_attention() -> None:
    model = tiny_model("mistral")
    with group_attention(model, 3) as is_fast:
        assert not is_fast
    with group_attention(tiny_model("gemma2"), 3) as is_fast:
        assert not is_fast


def test_the_text_pass_gives_the_models_own_logits_and_no_gradient() -> None:
    model = tiny_model("llama")
    memory, own = text_pass(model, TEXT, slice(4, 9))
    torch.testing.assert_close(own, model(TEXT[None]).logits[0, 4:9], rtol=0, atol=1e-10)
    assert len(memory) == 2
    assert not own.requires_grad
    assert memory[0][0].shape == (1, 2, len(TEXT), 8)


def test_running_groups_leaves_the_memory_of_the_text_alone() -> None:
    model = tiny_model("llama")
    embeddings = random_prompt_tokens(32, 3).embeddings
    memory, _ = text_pass(model, TEXT, slice(-1, None))
    before = [(keys.clone(), values.clone()) for keys, values in memory]
    first = group_logits(model, embeddings, memory, torch.tensor([2, 6]))
    assert torch.equal(group_logits(model, embeddings, memory, torch.tensor([2, 6])), first)
    for (keys, values), (old_keys, old_values) in zip(memory, before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


def test_the_mask_lets_a_group_see_the_text_before_it_and_itself() -> None:
    mask = group_mask(torch.tensor([0, 2]), 4, prompt_visibility(2, 1))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]
