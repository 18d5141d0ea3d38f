"""Forged guesses with known ranks reach exactly the steps and states that a design predicts.

``ranks[i][j-1]`` is the rank of new token ``i + j`` among the guesses made when new token ``i`` is the root. The rule:
at root ``i`` in state ``k`` the deepest node of ``T_k`` whose path is a start of ``ranks[i]`` is accepted, the root
moves on by its depth + 1, and its prompt tokens are the next state.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime import Settings, generate
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.designs import designs
from tests.ppd_runtime.forged import ForgedGuesses
from tests.ppd_runtime.tiny import tiny_model
from treeopt.types import TreeDesign

PROMPT = [5, 6, 7]
LENGTH = 25
MAX_RANK = 4
VOCAB = 61


@pytest.fixture(scope="module")
def oracle() -> tuple[LoadedModel, tuple[int, ...]]:
    loaded = wrap_model(tiny_model("llama"))
    ids = torch.tensor([PROMPT])
    written = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
    )
    return loaded, tuple(written[0, len(PROMPT) :].tolist())


def replay(design: TreeDesign, ranks: Sequence[Sequence[int]], start: int) -> list[int]:
    """Walk the ranks by the rule and return the steps per state."""
    steps = [0] * len(design.trees)
    at, state = 0, start
    while at < LENGTH - 1:
        steps[state] += 1
        nodes = [node for node in design.trees[state].nodes if node.path == tuple(ranks[at][: node.depth])]
        last = max(nodes, key=lambda node: node.depth)
        at, state = at + last.depth + 1, last.prompt_tokens
    return steps


def forge(text: Sequence[int], ranks: Sequence[Sequence[int]], m: int, num_epts: int) -> ForgedGuesses:
    """Guess so that the true token of each distance has its prescribed rank; all other ranks are wrong and differ."""

    def guess(token_ids: Sequence[int], path: tuple[int, ...]) -> int:
        root, distance, rank = len(token_ids) - len(PROMPT) - 1, len(path), path[-1]
        true = text[root + distance] if root + distance < len(text) else 0
        prescribed = ranks[root][distance - 1]
        return true if rank == prescribed else (true + 1 + rank) % VOCAB

    return ForgedGuesses(guess, m, 32, num_epts)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_steps_states_and_text_are_exactly_as_predicted(
    oracle: tuple[LoadedModel, tuple[int, ...]], data: st.DataObject
) -> None:
    loaded, text = oracle
    num_epts = data.draw(st.sampled_from([0, 1, 1, 2]))
    design = data.draw(designs(e=num_epts, max_rank=MAX_RANK - 1))
    m = design.num_distances
    # Low ranks often, so that paths are deep; MAX_RANK is in no tree.
    rank = st.sampled_from([0, 0, 0, 1, 2, MAX_RANK])
    ranks = data.draw(st.lists(st.lists(rank, min_size=m, max_size=m), min_size=LENGTH, max_size=LENGTH))
    (result,) = generate(loaded, [PROMPT], design, forge(text, ranks, m, num_epts), Settings(max_new_tokens=LENGTH))
    assert result.token_ids == text
    steps = replay(design, ranks, start=m)
    assert result.run.steps_per_state == tuple(steps)
    assert result.run.num_steps == sum(steps)
