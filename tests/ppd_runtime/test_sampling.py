"""Sampling with a tree follows the model's distribution exactly; what cannot be exact is refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ppd_runtime import Settings, Typical, generate, hf
from ppd_runtime.decode import _walk, decode
from ppd_runtime.generate import open_session, session_of
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.sampling import TokenRule, check_processors, generation_processors
from ppd_runtime.session import Text
from tests.ppd_runtime.designs import make_design, uniform_design
from tests.ppd_runtime.forged import ForgedGuesses
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import DecodeError, InvalidValueError
from treeopt.types import TreeDesign

VOCAB = 5
PROMPT = [1, 2, 3]
SAMPLES = 20_000


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    return wrap_model(tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=1, dtype=torch.float32))


def probabilities(loaded: LoadedModel, token_ids: Sequence[int], settings: Settings) -> torch.Tensor:
    """Return the distribution of the next token, computed by hand."""
    logits = loaded.model(torch.tensor([token_ids])).logits[0, -1].double() / settings.temperature
    if settings.top_k:
        logits[logits < logits.topk(settings.top_k).values[-1]] = -torch.inf
    if settings.top_p < 1:
        order = logits.argsort(descending=True)
        before = logits[order].softmax(0).cumsum(0) - logits[order].softmax(0)
        logits[order[before >= settings.top_p]] = -torch.inf
    return logits.softmax(0)


def exact(loaded: LoadedModel, length: int, settings: Settings) -> torch.Tensor:
    """Return the probability of every continuation of some length, shape (vocabulary ** length,)."""
    paths, shares = [[]], [1.0]
    for _ in range(length):
        following = [probabilities(loaded, [*PROMPT, *path], settings).tolist() for path in paths]
        shares = [share * each for share, row in zip(shares, following, strict=True) for each in row]
        paths = [[*path, token] for path in paths for token in range(VOCAB)]
    return torch.tensor(shares, dtype=torch.float64)


class ManyTexts:
    """Samples many continuations in batches; every text is a row of its own."""

    def __init__(
        self, loaded: LoadedModel, design: TreeDesign, source: ForgedGuesses, settings: Settings, batch: int = 2500
    ) -> None:
        self.arguments = (loaded, design, source)
        self.settings = settings
        self.batch = batch

    def counts(self, length: int) -> torch.Tensor:
        loaded, design, source = self.arguments
        counts = torch.zeros(VOCAB**length)
        for start in range(0, SAMPLES, self.batch):
            # Texts share the processors of one that was opened as users open it: building them is what takes time.
            _, (model_text,) = open_session(loaded, [PROMPT], design, source, self.settings)
            texts = [
                Text(
                    model_text.prompt_ids,
                    replace(model_text.rule, generator=torch.Generator().manual_seed(start + index)),
                    model_text.stop,
                )
                for index in range(self.batch)
            ]
            session = session_of(loaded, texts, design, source, length, "dynamic")
            for _ in decode(session):
                pass
            for text in texts:
                index = 0
                for token in text.new_ids:
                    index = index * VOCAB + token
                counts[index] += 1
        return counts


def by_rank(token_ids: Sequence[int], path: tuple[int, ...]) -> int:
    return (token_ids[-1] + path[-1] + sum(path)) % VOCAB


TREES = {
    "wide": uniform_design(2, [(0,), (1,), (2,), (3,)]),
    "deep": uniform_design(2, [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]),
    "shared": make_design([{(): 1}, {(): 2, (0,): 1}, {(): 0, (0,): 2, (0, 0): 1, (0, 1): 0, (0, 2): 2, (0, 3): 1}]),
}


@pytest.mark.parametrize(
    ("tree", "length", "settings"),
    [
        ("wide", 2, Settings(temperature=1.0)),
        ("deep", 3, Settings(temperature=0.7)),
        ("shared", 3, Settings(temperature=1.5, top_k=4)),
        ("deep", 3, Settings(temperature=1.0, top_p=0.9)),
    ],
)
def test_continuations_follow_the_models_own_distribution(
    small: LoadedModel, tree: str, length: int, settings: Settings
) -> None:
    source = ForgedGuesses(by_rank, 2, 32)
    source.embeddings = source.embeddings.float()
    counts = ManyTexts(small, TREES[tree], source, replace(settings, max_new_tokens=length)).counts(length)
    expected = exact(small, length, settings) * SAMPLES
    assert counts[expected == 0].sum() == 0
    # Rare continuations are pooled: chi-square wants about five expected in every bin.
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    keep = wanted > 0
    # Seeds are fixed, so this is no coin toss; 1e-3 leaves room for an honest sampler.
    assert chisquare(observed[keep].numpy(), (wanted[keep] * (SAMPLES / wanted[keep].sum())).numpy()).pvalue > 1e-3


def test_trap_2_a_node_is_asked_once_however_many_paths_share_it(small: LoadedModel) -> None:
    """Accepting when any of several draws hits a child would accept too often: one draw per visited node."""
    asked: list[int] = []

    class Counting(TokenRule):
        def next_token(self, logits: torch.Tensor, before: Sequence[int], children: dict[int, int]) -> int:
            asked.append(len(before))
            return super().next_token(logits, before, children)

    source = ForgedGuesses(by_rank, 2, 32)
    source.embeddings = source.embeddings.float()
    session, (text,) = open_session(
        small, [PROMPT], TREES["deep"], source, Settings(temperature=1.0, max_new_tokens=40)
    )
    text.rule = Counting(text.rule.processors, text.rule.generator)
    for _ in decode(session):
        pass
    assert len(asked) == len(set(asked))  # one question per position of the text
    assert max(asked) >= len(PROMPT) + 39


def test_the_same_seed_gives_the_same_text_and_another_seed_another(small: LoadedModel) -> None:
    def text(seed: int) -> tuple[int, ...]:
        return generate(small, [PROMPT], settings=Settings(temperature=1.0, seed=seed, max_new_tokens=30))[0].token_ids

    assert text(1) == text(1) != text(2)


def test_a_text_of_a_batch_samples_what_it_would_alone() -> None:
    loaded = wrap_model(tiny_model("llama", vocab_size=VOCAB))
    design, source = TREES["deep"], ForgedGuesses(by_rank, 2, 32)
    together = generate(
        loaded, [PROMPT, [4], [0, 0]], design, source, Settings(temperature=1.0, seed=5, max_new_tokens=20)
    )
    for index, prompt in enumerate([PROMPT, [4], [0, 0]]):
        options = Settings(temperature=1.0, seed=5 + index, max_new_tokens=20)
        assert generate(loaded, [prompt], design, source, options)[0].token_ids == together[index].token_ids


def test_typical_acceptance_takes_the_best_ranked_acceptable_child(small: LoadedModel) -> None:
    """Medusa's rule by hand: a child passes above min(epsilon, delta exp(-entropy))."""
    design = uniform_design(1, [(0,), (1,), (2,)])
    source = ForgedGuesses(lambda token_ids, path: path[-1], 1, 32)
    source.embeddings = source.embeddings.float()
    settings = Settings(temperature=1.0, typical=Typical(0.4, 0.9))
    session, (text,) = open_session(small, [PROMPT], design, source, settings)
    tree = session.trees[1]
    scores = torch.tensor([[0.05, 0.30, 0.35, 0.2, 0.1]]).log().repeat(4, 1)
    row = scores[0].exp().double()
    threshold = min(0.4, 0.9 * float(torch.exp((row * row.log()).sum())))
    assert 0.05 < threshold < 0.30
    # Token 0 (rank 0) is too improbable, token 1 passes though token 2 is likelier: ranks decide.
    walk = _walk(text, tree, (3, 0, 1, 2), scores, [2] * 4)
    assert walk.rows == (0, 2)
    assert walk.tokens[0] == 1
    # A node without a guess stands for no token, though Python would count -1 from the end of the vocabulary.
    walk = _walk(text, tree, (3, -1, 0, -1), torch.tensor([[0.0, 0.1, 0.1, 0.1, 0.7]]).log().repeat(4, 1), [4] * 4)
    assert walk.rows == (0,)


def test_typical_acceptance_needs_probabilities() -> None:
    with pytest.raises(InvalidValueError, match="typical: needs a temperature above 0"):
        Settings(typical=Typical())


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": [3, 9, 27]},
        {"bad_words_ids": [[5], [6, 7]]},
        {"suppress_tokens": [1, 2, 3]},
        {"begin_suppress_tokens": [4, 5], "forced_eos_token_id": 8},
        {"sequence_bias": [[[5], 1.5]]},
    ],
    ids=lambda option: next(iter(option)),
)
@pytest.mark.parametrize("tree", ["wide", "deep"])
def test_processors_see_the_path_of_every_node(option: dict[str, object], tree: str) -> None:
    """Greedy decoding with the processors of a generation config equals generate with that config."""
    loaded = wrap_model(tiny_model("llama"))
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    common = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **option}
    expected = tuple(loaded.model.generate(ids, **common)[0, len(PROMPT) :].tolist())
    config = loaded.model.generation_config
    before = {name: getattr(config, name) for name in option}
    try:
        for name, value in option.items():
            setattr(config, name, value)
        text = (*PROMPT, *expected, 0, 0, 0)

        def guess(token_ids: Sequence[int], path: tuple[int, ...]) -> int:  # rank 0 is right, so nodes are visited
            at = len(token_ids) + len(path) - 1
            return (text[min(at, len(text) - 1)] + path[-1]) % 61

        (result,) = generate(loaded, [PROMPT], TREES[tree], ForgedGuesses(guess, 2, 32), Settings(max_new_tokens=24))
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    assert result.token_ids == expected
    assert result.run.num_steps < len(expected) - 1


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize(
    ("make", "name"),
    [(Unknown, "Unknown"), (lambda: PrefixConstrainedLogitsProcessor(lambda b, ids: [1], 1), "PrefixConstrained")],
)
def test_processors_that_may_depend_on_more_are_refused_by_name(make: Callable[[], object], name: str) -> None:
    with pytest.raises(DecodeError, match=f"logits processor {name}.*leave it out or use the model's own generate"):
        check_processors(LogitsProcessorList([make()]))


def test_known_processors_are_not_refused() -> None:
    known = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), NoRepeatNGramLogitsProcessor(2)])
    assert check_processors(known) is known


def test_guidance_runs_passes_of_its_own_and_is_refused(small: LoadedModel) -> None:
    config = GenerationConfig(guidance_scale=1.5)
    with pytest.raises(DecodeError, match="UnbatchedClassifierFreeGuidance"):
        generation_processors(small.model, config, prompt_length=3, max_new_tokens=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("cache", "fast")],
)
def test_settings_refuse_what_makes_no_sense(field: str, value: object) -> None:
    with pytest.raises(InvalidValueError, match=field):
        Settings(**{field: value})


def test_vocabulary_of_the_fixture_is_tiny(small: LoadedModel) -> None:
    assert hf.vocab_size(small.model) == VOCAB


def test_probabilities_that_are_not_finite_are_one_clear_line(small: LoadedModel) -> None:
    with pytest.raises(DecodeError, match="raise the temperature or use a wider dtype"):
        generate(small, [[1, 2]], settings=Settings(max_new_tokens=4, temperature=1e-320))
