import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime import FreeGuesses, LookupGuesses, PromptGuesses, Settings, generate, guess_source, hf
from ppd_runtime.buffers import StateBuffers, compile_design
from ppd_runtime.guesses import NO_GUESS, rank_guesses
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import PromptTokens, random_prompt_tokens
from tests.ppd_runtime.designs import DEEP, designs, uniform_design
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import DecodeError, InvalidValueError, ModelError


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model(tiny_model("llama"))


def last_tree(paths: list[tuple[int, ...]], m: int = 3, e: int = 0) -> StateBuffers:
    design = uniform_design(m, paths, e=e)
    return compile_design(design, num_distances=m, vocab_size=50, num_epts=e)[m]


def test_nodes_hold_the_guess_of_their_depth_and_rank() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [9.0, 1.0, 5.0, 7.0]])
    tree = last_tree([(0,), (2,), (0, 0), (0, 3), (2, 1)], m=2, e=1)
    by_path = dict(zip(tree.paths, rank_guesses(tree, logits).tolist(), strict=True))
    assert {path: token for path, token in by_path.items() if path} == {
        (0,): 1,
        (2,): 3,
        (0, 0): 0,
        (0, 3): 1,
        (2, 1): 3,
    }


def test_logits_that_are_not_a_number_guess_nothing_and_spare_the_others() -> None:
    logits = torch.tensor([[torch.nan, 3.0, 2.0, 1.0], [9.0, 1.0, 5.0, 7.0]])
    tree = last_tree([(0,), (1,), (0, 0)], m=2, e=1)
    assert rank_guesses(tree, logits).tolist()[1:] == [NO_GUESS, 1, 0]


def continuations_by_hand(tokens: list[int], max_ngram: int, max_matches: int) -> list[int]:
    """List the places after earlier copies of the last n tokens: longest n first, then latest first."""
    places: list[int] = []
    for n in range(min(max_ngram, len(tokens)), 0, -1):
        found = [at for at in range(len(tokens) - 1, n - 1, -1) if tokens[at - n : at] == tokens[-n:]]
        places += [at for at in found[:max_matches] if at not in places]
    return places[:max_matches]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(1, 5),
    designs(e=0, max_rank=3),
    st.integers(0, 29),
)
def test_lookup_guesses_what_followed_before(tokens: list[int], max_ngram: int, matches: int, design, cut: int) -> None:
    source = LookupGuesses(design.num_distances, max_ngram=max_ngram, max_matches=matches)
    cut = min(cut, len(tokens) - 1)
    guesser = source.begin(tokens[:cut])
    guesser.extend(tokens[cut:])
    tree = compile_design(design, num_distances=design.num_distances, vocab_size=9, num_epts=0)[-1]
    places = continuations_by_hand(tokens, max_ngram, matches)
    expected: dict[tuple[int, ...], tuple[int, ...] | None] = {(): ()}  # path -> tokens below the root
    for path in tree.paths[1:]:
        above = expected[path[:-1]]
        expected[path] = None
        if above is None:
            continue
        starts = [tokens[at : at + len(path)] for at in places]
        following = [start[-1] for start in starts if len(start) == len(path) and tuple(start[:-1]) == above]
        ranked = list(dict.fromkeys(following))
        if path[-1] < len(ranked):
            expected[path] = (*above, ranked[path[-1]])
    guesses = guesser.guess(tree, None).tolist()[1:]
    assert guesses == [NO_GUESS if expected[path] is None else expected[path][-1] for path in tree.paths[1:]]


def test_lookup_reaches_fewer_passes_on_text_that_repeats(llama: LoadedModel) -> None:
    prompt = [5, 6, 7, 8] * 5
    chain = uniform_design(3, [(0,), (0, 0), (0, 0, 0)], e=0)
    (result,) = generate(llama, [prompt], chain, LookupGuesses(3), Settings(max_new_tokens=80))
    (plain,) = generate(llama, [prompt], settings=Settings(max_new_tokens=80))
    assert result.token_ids == plain.token_ids
    assert result.run.num_steps < plain.run.num_steps
    assert result.run.steps_per_state[:3] == (0, 0, 0)  # the state is always m


def test_free_prompt_tokens_are_the_running_mean_of_the_text(llama: LoadedModel) -> None:
    guesser = FreeGuesses(llama, 3).begin([1, 2, 3])
    guesser.extend([4, 4])
    mean = hf.embed_tokens(llama.model, torch.tensor([1, 2, 3, 4, 4])).mean(0)
    torch.testing.assert_close(guesser.embeddings, mean.expand(3, -1), rtol=0, atol=1e-6)


def test_free_prompt_tokens_of_the_vocabulary_are_the_mean_of_the_lowest_ids(llama: LoadedModel) -> None:
    guesser = FreeGuesses(llama, 2, init="vocabulary", num_frequent=10).begin([1])
    before = guesser.embeddings.clone()
    guesser.extend([9])
    mean = hf.embed_tokens(llama.model, torch.arange(10)).mean(0)
    torch.testing.assert_close(guesser.embeddings, mean.expand(2, -1), rtol=0, atol=1e-6)
    assert torch.equal(before, guesser.embeddings)


def test_ept_logits_are_averaged(llama: LoadedModel) -> None:
    """With n copies of one embedding and the ensemble mask the guesses are those of one."""
    one = random_prompt_tokens(32, 3, 1, std=0.3)
    copies = PromptTokens(one.embeddings.expand(3, 4, 32).clone(), "ensemble", "tiny")
    design = uniform_design(3, [(0,), (1,), (0, 0)])
    wide = uniform_design(3, [(0,), (1,), (0, 0)], e=4)
    options = Settings(max_new_tokens=30)
    (single,) = generate(llama, [[4, 5, 6]], design, PromptGuesses(llama, one), options)
    (ensemble,) = generate(llama, [[4, 5, 6]], wide, PromptGuesses(llama, copies), options)
    assert single.token_ids == ensemble.token_ids
    assert single.run.steps_per_state == ensemble.run.steps_per_state


def test_prompt_tokens_of_another_model_are_refused(llama: LoadedModel) -> None:
    with pytest.raises(ModelError, match="hidden size 16"):
        PromptGuesses(llama, random_prompt_tokens(16, 3))
    other = PromptTokens(random_prompt_tokens(32, 3).embeddings, "ensemble", "other", "0" * 64)
    with pytest.raises(ModelError, match=r"trained for other \(digest 000000000000\)"):
        PromptGuesses(llama, other)


def test_trained_ranks_match_the_models_own_forward(llama: LoadedModel) -> None:
    """The guesses of the first step are the top tokens of prompt tokens appended to the prompt by hand."""
    tokens = random_prompt_tokens(32, 3, std=0.3)
    from ppd_runtime.decode import prefill, propose
    from ppd_runtime.generate import open_session

    prompt = [4, 5, 6, 7]
    session, _ = open_session(llama, [prompt], DEEP, PromptGuesses(llama, tokens), Settings())
    prefill(session)
    proposal = propose(session)
    embeddings = torch.cat(
        [hf.embed_tokens(llama.model, torch.tensor([prompt])), tokens.embeddings.double().view(1, 3, 32)], 1
    )
    logits = llama.model(inputs_embeds=embeddings).logits[0, 4:]
    for path, token in zip(session.trees[3].paths[1:], proposal.node_tokens[0][1:], strict=True):
        assert token == logits[len(path) - 1].argsort(descending=True)[path[-1]]


def test_sources_by_name(llama: LoadedModel) -> None:
    assert guess_source(llama, "free", 2).num_distances == 2
    assert guess_source(llama, "lookup", 5).num_epts == 0
    assert guess_source(llama, "prompt", 3, random_prompt_tokens(32, 3)).name == "prompt"
    with pytest.raises(DecodeError, match="prompt needs prompt tokens"):
        guess_source(llama, "prompt", 3)
    with pytest.raises(DecodeError, match="must be prompt, free or lookup, not 'magic'"):
        guess_source(llama, "magic", 3)
    for bad in ({"max_ngram": 0}, {"max_matches": 0}):
        with pytest.raises(InvalidValueError, match=next(iter(bad))):
            LookupGuesses(3, **bad)
