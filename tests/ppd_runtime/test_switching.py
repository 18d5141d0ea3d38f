"""Decoding that switches between designs writes what plain decoding writes, with the design the table names."""

import pytest

from ppd_runtime import LookupGuesses, PromptGuesses, Settings, generate, hf, random_prompt_tokens
from ppd_runtime.decode import choose_trees, prefill, step
from ppd_runtime.generate import open_session
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.designs import CHAIN, DEEP, EMPTY, WIDE
from tests.ppd_runtime.tiny import tiny_model
from treeopt import SwitchEntry, SwitchTable
from treeopt.artifact import digest
from treeopt.errors import DecodeError

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15, 3, 3]]
SWITCH = SwitchTable(
    (
        SwitchEntry(1, 12, DEEP),
        SwitchEntry(1, 20, EMPTY),  # plain decoding between two designs that guess
        SwitchEntry(1, 30, WIDE),
        SwitchEntry(2, 30, CHAIN),
        SwitchEntry(3, 30, DEEP),
    )
)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


@pytest.fixture(scope="module")
def source(llama: LoadedModel) -> PromptGuesses:
    return PromptGuesses(llama, random_prompt_tokens(hf.embedding_size(llama.model), 3, 1, std=0.3, seed=1))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_switching_writes_the_text_of_plain_decoding(llama: LoadedModel, source: PromptGuesses, cache: str) -> None:
    settings = Settings(max_new_tokens=40, cache=cache)
    plain = generate(llama, PROMPTS, settings=settings, raw=True)
    switched = generate(llama, PROMPTS, SWITCH, source, settings, raw=True)
    assert [each.token_ids for each in switched] == [each.token_ids for each in plain]
    alone = generate(llama, PROMPTS[:1], SWITCH, source, settings, raw=True)
    assert alone[0].token_ids == plain[0].token_ids


def test_every_step_uses_the_design_of_its_batch_and_context(llama: LoadedModel, source: PromptGuesses) -> None:
    session, _ = open_session(llama, PROMPTS[:1], SWITCH, source, Settings(max_new_tokens=40), raw=True)
    prefill(session)
    used = []
    while session.texts[0].finish_reason is None:
        context = max(session.cache.lengths)
        expected = 0 if context <= 12 else 1 if context <= 20 else 2
        choose_trees(session)
        assert session.trees is session.designs[expected]
        used.append(expected)
        step(session)
    assert used == sorted(used)
    assert set(used) == {0, 1, 2}
    # DEEP stands in two entries and is compiled once.
    assert session.designs[4] is session.designs[0]


def test_fewer_texts_running_is_another_design(llama: LoadedModel, source: PromptGuesses) -> None:
    session, _ = open_session(llama, PROMPTS, SWITCH, source, Settings(max_new_tokens=40), raw=True)
    prefill(session)
    for num_texts, place in ((3, 4), (2, 3), (1, 0)):
        session.texts = session.texts[:num_texts]
        session.cache.keep_batch_rows(list(range(num_texts)))
        choose_trees(session)
        assert session.trees is session.designs[place]


def test_the_record_of_a_switched_text_names_the_table(llama: LoadedModel, source: PromptGuesses) -> None:
    run = generate(llama, PROMPTS[:1], SWITCH, source, Settings(max_new_tokens=30), raw=True)[0].run
    assert run.tree_digest == digest(SWITCH)
    assert (run.guesses, sum(run.steps_per_state)) == ("prompt", run.num_steps)


def test_a_table_for_other_guesses_is_refused(llama: LoadedModel) -> None:
    with pytest.raises(DecodeError, match="counts 1 tokens per prompt token, the guesses need 0"):
        generate(llama, PROMPTS[:1], SWITCH, LookupGuesses(3), raw=True)
