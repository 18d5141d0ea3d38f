"""hf.py: masks, windows, embeddings and limits, against the model's own forward."""

import pytest
import torch
from transformers import AutoConfig, DynamicCache, FalconConfig, MptConfig

from ppd_runtime import hf
from tests.ppd_runtime.tiny import FAMILIES, tiny_model
from treeopt.errors import ModelError


def causal(num_tokens: int) -> torch.Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()[None, None]


def rows_of(model, ids, **changes):
    arguments = {
        "inputs_embeds": hf.embed_tokens(model, ids),
        "mask": causal(ids.shape[1]),
        "position_ids": torch.arange(ids.shape[1])[None],
        "cache": None,
        "rows": None,
    }
    with torch.inference_mode():
        return hf.forward_rows(model, **{**arguments, **changes})


@pytest.mark.parametrize(
    "rows", [slice(-1, None), slice(2, 5), torch.tensor([4, 0]), torch.tensor([], dtype=torch.long)]
)
def test_only_the_asked_rows_reach_the_head(rows):
    model = tiny_model()
    ids = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(1))
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    everything = rows_of(model, ids)
    some = rows_of(model, ids, rows=rows)
    torch.testing.assert_close(some, everything[:, rows], rtol=0, atol=1e-12)
    assert seen == [7, some.shape[1]]


def test_eager_and_sdpa_agree_on_a_tree_mask():
    """A boolean mask handed to eager attention would be added as 0 and 1."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(61, (1, 6), generator=generator)
    mask = causal(6).clone()
    mask[..., 3, 2] = mask[..., 5, 1] = False
    sdpa, eager = (rows_of(tiny_model(attention=name), ids, mask=mask) for name in ("sdpa", "eager"))
    torch.testing.assert_close(sdpa, eager, rtol=0, atol=1e-6)
    assert (sdpa - rows_of(tiny_model(), ids)).abs().max() > 0.1


def test_a_row_that_attends_to_nothing_is_finite():
    mask = causal(4).clone()
    mask[..., 2, :] = False
    assert rows_of(tiny_model(), torch.tensor([[3, 4, 5, 6]]), mask=mask).isfinite().all()


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [8, 9, 23])
def test_texts_longer_than_a_sliding_window_equal_the_models_own(family, length):
    model = tiny_model(family, sliding_window=8)
    ids = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        own = model(ids, use_cache=False).logits
    torch.testing.assert_close(rows_of(model, ids), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_tree_beyond_the_sliding_window_equals_its_linear_paths(family):
    model = tiny_model(family, sliding_window=8)
    generator = torch.Generator().manual_seed(4)
    context, tree = torch.randint(61, (1, 20), generator=generator), torch.randint(61, (1, 5), generator=generator)
    parents = [-1, 0, 0, 2, 3]
    paths = []
    for node in range(5):
        paths.append([*(paths[parents[node]] if node else []), node])
    cache = DynamicCache()  # without the config: layers that keep every token
    rows_of(model, context, cache=cache)
    mask = torch.zeros(1, 1, 5, 25, dtype=torch.bool)
    mask[..., :20] = True
    for node, path in enumerate(paths):
        mask[0, 0, node, [20 + ancestor for ancestor in path]] = True
    positions = torch.tensor([[19 + len(path) for path in paths]])
    found = rows_of(model, tree, cache=cache, mask=mask, position_ids=positions)[0]
    for node, path in enumerate(paths):
        with torch.inference_mode():
            own = model(torch.cat([context, tree[:, path]], 1), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found[node], own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_that_the_model_looks_up(family):
    """Gemma scales its embeddings; OPT projects narrow ones."""
    model = tiny_model(family)
    ids = torch.tensor([[5, 9, 2]])
    with torch.inference_mode():
        by_embedding = model(inputs_embeds=hf.embed_tokens(model, ids), use_cache=False).logits
        by_token = model(ids, use_cache=False).logits
    torch.testing.assert_close(by_embedding, by_token, rtol=0, atol=1e-9)
    assert hf.embed_tokens(model, ids).shape == (1, 3, hf.embedding_size(model))
    assert by_token.shape[-1] == hf.vocab_size(model) == 61


def test_context_limits():
    assert hf.context_limit(tiny_model("gpt2").config) == 128
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    )
    assert hf.context_limit(config) == 32, "LongRoPE turns tokens differently beyond its first limit"


@pytest.mark.parametrize(("ids", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_a_model_may_have_none_one_or_several_ends(ids, expected):
    model = tiny_model()
    model.generation_config.eos_token_id = ids
    assert hf.eos_token_ids(model) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("t5"), "encoder-decoder"),
        (AutoConfig.for_model("bloom"), "ALiBi"),
        (FalconConfig(alibi=True), "ALiBi"),
        (MptConfig(), "ALiBi"),
        (AutoConfig.for_model("mamba"), "recurrent state"),
        (AutoConfig.for_model("rwkv"), "recurrent state"),
        (AutoConfig.for_model("qwen3_next"), "recurrent state"),
        (AutoConfig.for_model("llama4_text"), "chunked_attention"),
        (AutoConfig.for_model("vit"), "no causal language model"),
    ],
)
def test_what_cannot_take_a_tree_is_refused_with_the_reason(config, reason):
    with pytest.raises(ModelError, match=reason):
        hf.refuse_unsupported(config, "some/model")


@pytest.mark.parametrize("backend", ["flash_attention_2", "flex_attention"])
def test_backends_without_masks_are_refused(backend):
    with pytest.raises(ModelError, match=backend):
        hf.refuse_backend(backend, "some/model")
