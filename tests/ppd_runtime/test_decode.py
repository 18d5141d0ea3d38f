"""Decoding with a tree writes what plain decoding writes, and leaves the cache that plain decoding leaves."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from ppd_runtime import FreeGuesses, LookupGuesses, PromptGuesses, Settings, generate, hf, random_prompt_tokens
from ppd_runtime import prefill as prefill_module
from ppd_runtime.decode import prefill, step
from ppd_runtime.generate import open_session
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.designs import DEEP, DESIGNS, designs, make_design, uniform_design
from tests.ppd_runtime.forged import ForgedGuesses
from tests.ppd_runtime.tiny import FAMILIES, tiny_model
from treeopt.errors import DecodeError
from treeopt.types import TreeDesign

PROMPTS = [[3, 4, 5, 6], [7], [9, 10, 11, 12, 13, 14, 15, 3, 3]]


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


def guesses_for(loaded: LoadedModel, design: TreeDesign, seed: int = 0) -> PromptGuesses:
    size = hf.embedding_size(loaded.model)
    num_epts = design.tokens_per_prompt_token
    return PromptGuesses(loaded, random_prompt_tokens(size, design.num_distances, num_epts, std=0.3, seed=seed))


_written: dict[tuple[object, ...], tuple[int, ...]] = {}


def plain(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int, **options: object) -> tuple[int, ...]:
    """Return the new tokens of the library's own greedy decoding."""
    key = (loaded.digest, tuple(prompt), max_new_tokens, str(options))
    if key not in _written:
        ids = torch.tensor([prompt])
        # The mask says that a 0 in the prompt is a token: without one, generate takes it for padding.
        written = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        _written[key] = tuple(written[0, len(prompt) :].tolist())
    return _written[key]


def favourites(loaded: LoadedModel, prompt: Sequence[int], max_new_tokens: int) -> ForgedGuesses:
    """Guess the text that plain decoding writes: rank 0 is always right."""
    text = [*prompt, *plain(loaded, prompt, max_new_tokens)]
    vocab = hf.vocab_size(loaded.model)

    def guess(token_ids: Sequence[int], path: tuple[int, ...]) -> int:
        at = len(token_ids) + len(path) - 1
        right = text[at] if at < len(text) else 0
        return (right + path[-1]) % vocab

    return ForgedGuesses(guess, 3, hf.embedding_size(loaded.model))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_what_plain_decoding_writes(family: str) -> None:
    loaded = wrap_model(tiny_model(family))
    for design in DESIGNS.values():
        results = generate(loaded, PROMPTS, design, guesses_for(loaded, design), Settings(max_new_tokens=24))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.token_ids == plain(loaded, prompt, 24)
            assert result.finish_reason == "length"


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_design_writes_what_plain_decoding_writes(data: st.DataObject) -> None:
    loaded = _shared_llama()
    num_epts = data.draw(st.integers(0, 2))
    design = data.draw(designs(e=num_epts))
    cache = data.draw(st.sampled_from(["dynamic", "static"]))
    prompt = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=12))
    if num_epts == 0:
        source = LookupGuesses(design.num_distances)
    elif num_epts == 1 and data.draw(st.booleans()):
        source = FreeGuesses(loaded, design.num_distances)
    else:
        source = guesses_for(loaded, design, seed=data.draw(st.integers(0, 9)))
    (result,) = generate(loaded, [prompt], design, source, Settings(max_new_tokens=14, cache=cache))
    assert result.token_ids == plain(loaded, prompt, 14)


def _shared_llama(cached: list[LoadedModel] = []) -> LoadedModel:  # noqa: B006 - hypothesis takes no module fixtures
    if not cached:
        cached.append(wrap_model(tiny_model("llama")))
    return cached[0]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_the_cache_equals_a_fresh_prefill_after_every_step(family: str, cache: str) -> None:
    loaded = wrap_model(tiny_model(family))
    options = Settings(max_new_tokens=45, cache=cache)
    source = favourites(loaded, PROMPTS[0], 45)
    session, texts = open_session(loaded, PROMPTS, DEEP, source, options)
    prefill(session)
    for _ in range(9):
        for b, text in enumerate(texts):
            ids = torch.tensor([text.token_ids[:-1]])  # the newest token is the next root, not yet in the cache
            assert session.cache.lengths[b] == ids.shape[1]
            fresh = DynamicCache()  # full layers, also for sliding windows
            hf.forward_rows(
                loaded.model,
                inputs_embeds=hf.embed_tokens(loaded.model, ids),
                mask=torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None],
                position_ids=torch.arange(ids.shape[1])[None],
                cache=fresh,
            )
            for layer, expected in enumerate(fresh.layers):
                keys, values = session.cache.committed(layer, b)
                torch.testing.assert_close(keys, expected.keys[0], rtol=0, atol=1e-9)
                torch.testing.assert_close(values, expected.values[0], rtol=0, atol=1e-9)
        step(session)


def test_texts_of_a_batch_equal_their_solo_runs_in_tokens_and_steps(llama: LoadedModel) -> None:
    eos = frozenset({plain(llama, PROMPTS[1], 9)[8]})
    options = Settings(max_new_tokens=25, eos_token_ids=eos)
    source = guesses_for(llama, DEEP)
    together = generate(llama, PROMPTS, DEEP, source, options)
    assert {each.finish_reason for each in together} == {"eos", "length"}
    for prompt, batched in zip(PROMPTS, together, strict=True):
        (solo,) = generate(llama, [prompt], DEEP, source, options)
        assert batched.token_ids == solo.token_ids
        assert batched.run.steps_per_state == solo.run.steps_per_state


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_prompts_read_in_chunks_give_the_same_text_and_steps(
    llama: LoadedModel, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = uniform_design(2, [(0,), (1,), (0, 0)], e=2)
    source = guesses_for(llama, design)
    whole = generate(llama, PROMPTS, design, source, Settings(max_new_tokens=12))
    monkeypatch.setattr(prefill_module, "PREFILL_CHUNK", chunk)
    for cache in ("dynamic", "static"):
        parts = generate(llama, PROMPTS, design, source, Settings(max_new_tokens=12, cache=cache))
        assert [each.token_ids for each in parts] == [each.token_ids for each in whole]
        assert [each.run.steps_per_state for each in parts] == [each.run.steps_per_state for each in whole]


def test_plain_decoding_is_one_token_a_pass(llama: LoadedModel) -> None:
    (result,) = generate(llama, PROMPTS[:1], settings=Settings(max_new_tokens=17))
    assert (result.run.num_steps, result.run.steps_per_state, result.run.guesses) == (16, (16,), "none")
    assert result.token_ids == plain(llama, PROMPTS[0], 17)


def test_trap_1_padding_of_a_short_guess_is_never_accepted_as_token_0() -> None:
    """The model always writes token 0; a node without a guess must not pass for it."""
    model = tiny_model("llama", tie_word_embeddings=False)
    model.get_output_embeddings().weight.data.zero_()
    loaded = wrap_model(model, self_check=False)  # every logit is 0: the first token, 0, wins
    nothing = ForgedGuesses(lambda token_ids, path: -1, 3, 32)
    (result,) = generate(loaded, PROMPTS[:1], DEEP, nothing, Settings(max_new_tokens=9))
    assert result.token_ids == (0,) * 9
    assert result.run.num_steps == 8


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_trap_3_nothing_follows_an_end_of_text_inside_an_accepted_block(llama: LoadedModel, at: int) -> None:
    text = plain(llama, PROMPTS[0], 20)
    eos = {text[at], 60}
    options = Settings(max_new_tokens=20, eos_token_ids=frozenset(eos))
    (result,) = generate(llama, PROMPTS[:1], DEEP, favourites(llama, PROMPTS[0], 20), options)
    end = next(i for i, token in enumerate(text) if token in eos)
    assert result.token_ids == text[: end + 1] == plain(llama, PROMPTS[0], 20, eos_token_id=sorted(eos))
    assert result.finish_reason == "eos"


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_trap_4_the_number_of_new_tokens_is_exact(llama: LoadedModel, max_new_tokens: int) -> None:
    source = favourites(llama, PROMPTS[0], 20)
    (result,) = generate(llama, PROMPTS[:1], DEEP, source, Settings(max_new_tokens=max_new_tokens))
    assert result.token_ids == plain(llama, PROMPTS[0], max_new_tokens)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("room", range(1, 9))
def test_trap_4_the_context_limit_is_exact_and_reached_without_stepping_over_it(family: str, room: int) -> None:
    loaded = wrap_model(tiny_model(family))
    prompt = [1 + i % 50 for i in range(128 - room)]
    for source in (guesses_for(loaded, DEEP), LookupGuesses(3), favourites(loaded, prompt, room)):
        design = DEEP if source.num_epts else uniform_design(3, [(0,), (0, 0), (0, 0, 0), (1,)], e=0)
        seen: list[int] = []
        session, (text,) = open_session(loaded, [prompt], design, source, Settings(max_new_tokens=50))
        run = session.forward

        def watched(model: object, run=run, seen=seen, **inputs: object) -> torch.Tensor:
            seen.append(int(inputs["position_ids"].max()))
            return run(model, **inputs)

        session.forward = watched
        prefill(session)
        while text.finish_reason is None:
            step(session)
        assert text.finish_reason == "context"
        assert tuple(text.new_ids) == plain(loaded, prompt, room)
        assert max(seen, default=0) <= 127


def test_prompts_that_fill_the_context_are_refused(llama: LoadedModel) -> None:
    for length in (128, 129, 300):
        with pytest.raises(DecodeError, match=rf"prompt 0: has {length} tokens, which leaves no room .* of 128"):
            generate(llama, [[1] * length], DEEP, guesses_for(llama, DEEP))


def test_guesses_that_are_not_a_number_cost_a_warning_and_nothing_else(llama: LoadedModel) -> None:
    source = guesses_for(llama, DEEP)
    source._embeddings = torch.full_like(source._embeddings, torch.nan)
    for cache in ("dynamic", "static"):
        with pytest.warns(RuntimeWarning, match="not finite") as caught:
            results = generate(llama, PROMPTS, DEEP, source, Settings(max_new_tokens=15, cache=cache))
        assert len(caught) == 1
        assert [each.token_ids for each in results] == [plain(llama, prompt, 15) for prompt in PROMPTS]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_guesses_that_become_nan_midway_do_not_reach_the_text(llama: LoadedModel, cache: str) -> None:
    session, (text,) = open_session(
        llama, PROMPTS[:1], DEEP, favourites(llama, PROMPTS[0], 20), Settings(max_new_tokens=15, cache=cache)
    )
    prefill(session)
    step(session)
    text.guesser.embeddings = torch.full_like(text.guesser.embeddings, torch.nan)
    with pytest.warns(RuntimeWarning, match="not finite") as caught:
        written = [step(session) for _ in range(14 - len(text.new_ids) + 1)]
    assert len(caught) == 1
    assert written[-1][0][0].finish_reason == "length"
    assert tuple(text.new_ids) == plain(llama, PROMPTS[0], 15)


def test_a_model_that_is_not_a_number_itself_is_an_error() -> None:
    model = tiny_model("llama")
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    loaded = wrap_model(model, self_check=False)
    with pytest.raises(DecodeError, match="its logits are not a number"):
        generate(loaded, PROMPTS, settings=Settings(max_new_tokens=3))


def test_running_out_of_memory_is_a_clear_error_and_the_model_stays_usable(llama: LoadedModel) -> None:
    session, _ = open_session(llama, PROMPTS, DEEP, guesses_for(llama, DEEP), Settings(max_new_tokens=9))

    def exhausted(*args: object, **inputs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    session.forward = exhausted
    prefill(session)
    with pytest.raises(
        DecodeError, match=r"out of memory on cpu with 3 texts of up to 10 tokens; decode fewer prompts"
    ):
        step(session)
    (result,) = generate(llama, PROMPTS[:1], DEEP, guesses_for(llama, DEEP), Settings(max_new_tokens=9))
    assert result.token_ids == plain(llama, PROMPTS[0], 9)


def test_trees_and_guesses_that_do_not_fit_are_refused(llama: LoadedModel) -> None:
    source = guesses_for(llama, DEEP)
    with pytest.raises(DecodeError, match=r"has states 0 to 2, the guesses reach distance 3"):
        generate(llama, PROMPTS, uniform_design(2, [(0,)]), source)
    with pytest.raises(DecodeError, match=r"asks for rank 61 in path \[61\], the vocabulary has 61 tokens"):
        generate(llama, PROMPTS, uniform_design(3, [(61,)]), source)
    with pytest.raises(DecodeError, match="a tree needs a source of guesses"):
        generate(llama, PROMPTS, DEEP)


def test_a_pass_costs_the_same_rows_whatever_the_text_length(llama: LoadedModel) -> None:
    """Rows, head rows and what commit moves depend on the state only."""
    design = make_design([{(): 0}, {(): 1, (0,): 1}])
    shapes = set()
    for length in (2, 60):
        source = replace_source(llama, design)
        session, _ = open_session(llama, [[5] * length], design, source, Settings(max_new_tokens=30))
        run = session.forward

        def watched(model: object, run=run, **inputs: object) -> torch.Tensor:
            shapes.add((inputs["inputs_embeds"].shape, len(inputs["rows"])))
            return run(model, **inputs)

        session.forward = watched
        prefill(session)
        for _ in range(5):
            step(session)
    assert shapes == {((1, 4, 32), 4)}


def replace_source(loaded: LoadedModel, design: TreeDesign) -> ForgedGuesses:
    return ForgedGuesses(lambda token_ids, path: -1, design.num_distances, hf.embedding_size(loaded.model))


def test_designs_are_values_that_decoding_does_not_change(llama: LoadedModel) -> None:
    before = replace(DEEP)
    generate(llama, PROMPTS[:1], DEEP, guesses_for(llama, DEEP), Settings(max_new_tokens=4))
    assert before == DEEP
