"""Prove, when a model loads, that it takes a tree: libraries have replaced masks and positions without a word.

A small random tree is run behind a short cached context, by the same forward as decoding. Three things must hold: every
node's logits are those of its own linear path, computed by the model itself from token ids with no mask, position or
cache of ours; changing one node changes no row outside the subtree below it; and the check can tell, because the wrong
mask (plain causal) gives clearly other logits.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ppd_runtime import hf
from treeopt.errors import ModelError

__all__ = ["check_takes_tree"]

CONTEXT_LEN = 6

PARENTS = (-1, 0, 0, 1, 1, 2, 3)
"""Parent of every node of the tree that is tried: three depths, siblings at two of them, children out of order."""

CHANGED = 2
"""The node whose token is changed; node 5 is below it, all others are not."""

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference that counts as rounding: root mean square over a row, in standard deviations of the logits. Norms
compute in float32 also in float64 models; the others leave room for other matrix routines at other row counts. A wrong
mask or position is worth 0.3 and more."""


def check_takes_tree(model: PreTrainedModel, name: str, *, seed: int = 0) -> None:
    """Run a small tree and compare it with the model's own forward.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode; its weights and settings are left as they were.
    name : str
        For the message.
    seed : int
        Seed of the random tokens.

    Raises
    ------
    ModelError
        When a node depends on anything but its own path, saying which check failed and by how much.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(PARENTS)
    tokens = torch.randint(hf.vocab_size(model), (CONTEXT_LEN + size,), generator=generator)
    context, tree = tokens[:CONTEXT_LEN].to(model.device), tokens[CONTEXT_LEN:].to(model.device)
    paths = [_path(node) for node in range(size)]
    try:
        with torch.inference_mode():
            found = _tree_logits(model, context, tree, paths)
            expected = torch.stack([_own_logits(model, context, tree[path]) for path in paths])
            other = tree.clone()
            other[CHANGED] = (other[CHANGED] + 1) % hf.vocab_size(model)
            changed = _tree_logits(model, context, other, paths)
            causal = _tree_logits(model, context, tree, [list(range(node + 1)) for node in range(size)])
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        # What a foreign forward raises on inputs it was not written for: the reason is in its words.
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"model {name}: its forward does not take a tree ({problem[0]}); choose another model"
        ) from error
    tolerance = TOLERANCES.get(model.dtype, TOLERANCES[torch.float32])
    outside = [node for node, path in enumerate(paths) if CHANGED not in path]
    off_path = _distance(found, expected, expected)
    by_sibling = _distance(found[outside], changed[outside], expected)
    if not off_path <= tolerance:  # also when it is not a number
        raise ModelError(
            f"model {name}: a tree node's logits differ from its linear path's by {off_path:.2g} standard deviations "
            f"(at most {tolerance:g}): it ignores the tree's mask or positions; choose another model or attention"
        )
    if not by_sibling <= tolerance:
        raise ModelError(
            f"model {name}: changing a sibling changes a node's logits by {by_sibling:.2g} standard deviations: the "
            "tree's mask is not kept; choose another model or attention"
        )
    blind = _distance(causal[outside[-1:]], expected[outside[-1:]], expected)
    if not blind > tolerance:
        raise ModelError(
            f"model {name}: its logits do not show whether the tree's mask is kept (a wrong mask changes them by "
            f"{blind:.2g} standard deviations only); load it in a wider dtype, or skip the check if it is untrained"
        )


def _distance(first: Tensor, second: Tensor, logits: Tensor) -> float:
    """Largest root-mean-square difference of a row, in standard deviations of the logits."""
    return ((first - second).square().mean(-1).sqrt().max() / logits.std()).item()


def _path(node: int) -> list[int]:
    """Nodes from the root down to a node."""
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def _tree_logits(model: PreTrainedModel, context: Tensor, tree: Tensor, paths: list[list[int]]) -> Tensor:
    """Logits of every node behind the cached context, shape (nodes, vocabulary), as decoding computes them."""
    length, size = len(context), len(tree)
    cache = DynamicCache()
    positions = torch.arange(length, device=context.device)
    hf.forward_rows(
        model,
        inputs_embeds=hf.embed_tokens(model, context[None]),
        mask=(positions[:, None] >= positions)[None, None],
        position_ids=positions[None],
        cache=cache,
        rows=slice(-1, None),
    )
    mask = torch.zeros(size, length + size, dtype=torch.bool)
    mask[:, :length] = True
    for node, path in enumerate(paths):
        mask[node, [length + ancestor for ancestor in path]] = True
    depths = torch.tensor([len(_path(node)) - 1 for node in range(size)])
    logits = hf.forward_rows(
        model,
        inputs_embeds=hf.embed_tokens(model, tree[None]),
        mask=mask[None, None].to(context.device),
        position_ids=(length + depths)[None].to(context.device),
        cache=cache,
    )
    return logits[0].float() if logits.dtype in (torch.float16, torch.bfloat16) else logits[0]


def _own_logits(model: PreTrainedModel, context: Tensor, path: Tensor) -> Tensor:
    """Logits after a linear text, by the model's own forward from token ids."""
    logits = model(torch.cat([context, path])[None], use_cache=False).logits[0, -1]
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
