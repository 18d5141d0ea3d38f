"""Graph replay on a CPU: a stand-in records a call and runs it again on replay, reading the same buffers."""

from collections.abc import Callable

import pytest
import torch

from ppd_runtime import PromptGuesses, Settings, generate
from ppd_runtime.decode import decode
from ppd_runtime.generate import open_session
from ppd_runtime.graphs import GraphedForward
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import random_prompt_tokens
from tests.ppd_runtime.designs import DEEP, make_design
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import DecodeError


class Recorder:
    """Like a CUDA graph: one output tensor, written by every replay; nothing of the call's arguments changes."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.captures += 1
        output = call()

        def replay() -> None:
            self.replays += 1
            output.copy_(call())

        return replay, output


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


PROMPTS = [[3, 4, 5, 6], [7], [9, 10, 11]]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_replayed_passes_write_the_same_text_and_are_recorded_once_per_shape(
    llama: LoadedModel, prompts: list[list[int]]
) -> None:
    design = make_design([{(): 1}, {(): 2, (0,): 3, (1,): 1}, {(): 3, (0,): 2}, {(): 1, (0,): 2, (0, 0): 3, (1,): 0}])
    source = PromptGuesses(llama, random_prompt_tokens(32, 3, std=0.3))
    options = Settings(max_new_tokens=40, cache="static")
    session, texts = open_session(llama, prompts, design, source, options)
    recorder = Recorder()
    session.forward = GraphedForward(recorder)
    for _ in decode(session):
        pass
    expected = generate(llama, prompts, design, source, options)
    assert [tuple(text.new_ids) for text in texts] == [each.token_ids for each in expected]
    assert [tuple(text.steps_per_state) for text in texts] == [each.run.steps_per_state for each in expected]
    assert recorder.captures <= 4 * len(prompts)
    assert recorder.replays > recorder.captures


def test_graphs_need_a_static_cache_and_a_cuda_device(llama: LoadedModel) -> None:
    session, _ = open_session(
        llama, PROMPTS, DEEP, PromptGuesses(llama, random_prompt_tokens(32, 3)), Settings(cache="dynamic")
    )
    session.forward = GraphedForward(Recorder())
    with pytest.raises(DecodeError, match="need the static cache"):
        list(decode(session))
    with pytest.raises(DecodeError, match=r"graph needs a CUDA device, the model is on cpu"):
        generate(llama, PROMPTS, settings=Settings(cache="graph"))


def test_a_model_that_cannot_be_captured_says_so(llama: LoadedModel) -> None:
    def refuse(call: Callable[[], torch.Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    session, _ = open_session(llama, PROMPTS, None, None, Settings(cache="static"))
    session.forward = GraphedForward(refuse)
    with pytest.raises(DecodeError, match=r"cannot be captured \(operation not permitted .*\); use cache dynamic"):
        list(decode(session))
