"""Every family that the runtime claims takes a tree, and the self-check can tell when one does not."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ppd_runtime import hf
from ppd_runtime.models import wrap_model
from ppd_runtime.self_check import check_takes_tree
from tests.ppd_runtime.tiny import FAMILIES, tiny_model
from treeopt.errors import ModelError


def random_parents(size: int, generator: torch.Generator) -> list[int]:
    return [-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, size))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_equals_its_linear_path(family):
    """Random trees behind a cached context, two texts of one batch at once."""
    model = wrap_model(tiny_model(family)).model
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        parents = random_parents(9, generator)
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        context = torch.randint(61, (2, 7), generator=generator)
        tree = torch.randint(61, (2, 9), generator=generator)
        mask = torch.zeros(1, 1, 9, 16, dtype=torch.bool)
        mask[..., :7] = True
        for node, path in enumerate(paths):
            mask[0, 0, node, [7 + ancestor for ancestor in path]] = True
        cache = DynamicCache()
        with torch.inference_mode():
            hf.forward_rows(
                model,
                inputs_embeds=hf.embed_tokens(model, context),
                mask=torch.ones(7, 7, dtype=torch.bool).tril()[None, None],
                position_ids=torch.arange(7)[None],
                cache=cache,
                rows=slice(-1, None),
            )
            found = hf.forward_rows(
                model,
                inputs_embeds=hf.embed_tokens(model, tree),
                mask=mask,
                position_ids=torch.tensor([[6 + len(path) for path in paths]]),
                cache=cache,
            )
            for node, path in enumerate(paths):
                own = model(torch.cat([context, tree[:, path]], 1), use_cache=False).logits[:, -1]
                torch.testing.assert_close(found[:, node], own, rtol=0, atol=1e-5)


def _break_mask(monkeypatch):
    """A library that silently replaces the mask by a causal one."""
    additive = hf._additive
    monkeypatch.setattr(
        hf,
        "_additive",
        lambda mask, dtype: additive(mask | torch.ones_like(mask).tril(mask.shape[-1] - mask.shape[-2]), dtype),
    )


def _break_positions(monkeypatch):
    """A library that counts positions itself."""
    forward = hf.forward_rows

    def counted(model, *, position_ids, **arguments):
        first = position_ids[:, :1]
        return forward(model, position_ids=first + torch.arange(position_ids.shape[1]), **arguments)

    monkeypatch.setattr(hf, "forward_rows", counted)


@pytest.mark.parametrize("damage", [_break_mask, _break_positions])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_finds_replaced_masks_and_positions(family, damage, monkeypatch):
    model = tiny_model(family)
    damage(monkeypatch)
    with pytest.raises(ModelError, match="linear path"):
        check_takes_tree(model, family)


def test_the_self_check_finds_alibi():
    """Also where no config field gives it away: the model is checked without the refusal by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("bloom", vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
        model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    with pytest.raises(ModelError, match=r"take a tree|linear path"):
        check_takes_tree(model, "bloom")


def test_the_self_check_refuses_to_guess():
    """Where even a wrong mask changes nothing, nothing is proven."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    with pytest.raises(ModelError, match="do not show"):
        check_takes_tree(model, "deaf")
