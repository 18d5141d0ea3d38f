"""Compiled passes write the same text, compile each pass size once, and leave the prompt alone."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from ppd_runtime import PromptGuesses, Settings, compiled, generate, random_prompt_tokens, wrap_model
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import DecodeError
from treeopt.types import SparseTree, TreeDesign

TREES = tuple(
    SparseTree.from_prompt_tokens({path: 1 for path in [(), (0,), (1,), (0, 0)] if len(path) <= state})
    for state in range(3)
)


def test_same_text_and_one_compilation_per_pass_size(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "BACKEND", counter)
    loaded = wrap_model(tiny_model("llama"))
    source = PromptGuesses(loaded, random_prompt_tokens(loaded.model.config.hidden_size, 2, seed=1))
    design = TreeDesign(TREES, None, "imported", "tau", None, 1, (8, 8, 8), None, None)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    plain = [generate(loaded, [ids], settings=Settings(max_new_tokens=12))[0].token_ids for ids in prompts]
    found = [
        generate(loaded, [ids], design, source, Settings(max_new_tokens=12, cache="compiled"))[0].token_ids
        for ids in prompts
    ]
    assert found == plain
    # Prompts of two lengths, states of one pass size, and one shape of the cache: one graph.
    assert counter.frame_count == 1


def test_a_pass_that_cannot_be_compiled_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", broken)
    loaded = wrap_model(tiny_model("llama"))
    with pytest.raises(DecodeError, match=r"torch\.compile: .* or run uncompiled"):
        generate(loaded, [[3, 1, 4]], settings=Settings(max_new_tokens=4, cache="compiled"))
