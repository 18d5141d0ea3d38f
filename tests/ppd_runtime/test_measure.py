"""Measured ranks are the decoder's own: the same guesses, at the same positions, judged against the same text."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ppd_runtime import PromptGuesses, Settings, Typical, hf, random_prompt_tokens
from ppd_runtime.acceptance import acceptance_table, bootstrap_intervals, rank_record
from ppd_runtime.answers import Text, generate_answers
from ppd_runtime.decode import prefill, step
from ppd_runtime.generate import open_session
from ppd_runtime.groups import group_logits, text_pass
from ppd_runtime.measure import TextRanks, measure_texts, ranks_of
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.prompt_tokens import PromptTokens
from tests.ppd_runtime.designs import DESIGNS, uniform_design
from tests.ppd_runtime.tiny import tiny_model
from treeopt.errors import TrainingError
from treeopt.replay import replay
from treeopt.types import TreeDesign

PROMPTS = [[3, 4, 5, 6], [7], [9, 10, 11, 12, 13, 14, 15, 3, 3]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama", vocab_size=23))


def prompt_tokens(loaded: LoadedModel, m: int = 3, num_epts: int = 1, mask: str = "ensemble") -> PromptTokens:
    return random_prompt_tokens(hf.embedding_size(loaded.model), m, num_epts, std=0.4, seed=6, mask=mask)


@pytest.mark.parametrize(("num_epts", "mask"), [(1, "ensemble"), (2, "ensemble"), (2, "decoder"), (2, "encoder")])
def test_ranks_equal_the_decoders_own_at_every_step(loaded: LoadedModel, num_epts: int, mask: str) -> None:
    tokens = prompt_tokens(loaded, num_epts=num_epts, mask=mask)
    design = uniform_design(3, [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)], e=num_epts)
    visited = 0
    for prompt in PROMPTS:
        (text,) = generate_answers(loaded, [prompt], max_new_tokens=20)
        (measured,) = measure_texts(loaded, tokens, [text], max_rank=23)
        new_ids = text.token_ids[text.num_prompt_tokens :]
        session, (decoded,) = open_session(
            loaded, [prompt], design, PromptGuesses(loaded, tokens), Settings(max_new_tokens=20)
        )
        prefill(session)
        while decoded.finish_reason is None:
            root = len(decoded.new_ids) - 1
            for j in range(1, decoded.state + 1):
                if root + j < len(new_ids):
                    own = ranks_of(decoded.guess_logits[j - 1], torch.tensor(new_ids[root + j]))
                    assert measured.ranks[root][j - 1] == own
                    visited += 1
            step(session)
        assert tuple(decoded.new_ids) == new_ids
    assert visited > 60


@pytest.mark.parametrize("name", sorted(DESIGNS))
def test_replay_of_measured_ranks_predicts_the_decoders_steps(loaded: LoadedModel, name: str) -> None:
    design: TreeDesign = DESIGNS[name]
    tokens = prompt_tokens(loaded, m=design.num_distances)
    texts = generate_answers(loaded, PROMPTS, max_new_tokens=24)
    results = measure_texts(loaded, tokens, texts, max_rank=23)
    record = rank_record(results, model="tiny", source="test", max_rank=23)
    steps = []
    for prompt in PROMPTS:
        session, (decoded,) = open_session(
            loaded, [prompt], design, PromptGuesses(loaded, tokens), Settings(max_new_tokens=24)
        )
        prefill(session)
        while decoded.finish_reason is None:
            step(session)
        steps.append(sum(decoded.steps_per_state))
    assert sum(replay(design, record).steps_per_state) == sum(steps)


def test_positions_and_past_the_end_follow_the_document(loaded: LoadedModel) -> None:
    tokens = prompt_tokens(loaded)
    text = Text((3, 9, 4, 11, 2, 6, 8), 3)  # new tokens: 11, 2, 6, 8
    (measured,) = measure_texts(loaded, tokens, [text], max_rank=23)
    assert len(measured.ranks) == 3
    assert measured.num_inside == 1
    for i in range(3):
        memory, _ = text_pass(loaded.model, torch.tensor(text.token_ids[: 3 + i]), slice(-1, None))
        guesses = group_logits(loaded.model, tokens.embeddings, memory, torch.tensor([2 + i]))[0]
        for j in (1, 2, 3):
            target = 3 + i + j
            if target >= 7:
                assert measured.ranks[i][j - 1] == 23
                assert measured.probabilities[i][j - 1] == 0
                continue
            order = sorted(range(23), key=lambda token: (-guesses[j - 1, token].item(), token))
            assert measured.ranks[i][j - 1] == order.index(text.token_ids[target])
            share = guesses[j - 1].softmax(-1)[text.token_ids[target]].item()
            assert measured.probabilities[i][j - 1] == pytest.approx(share, rel=1e-9)


def test_many_groups_are_cut_into_passes_without_a_trace(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt_tokens(loaded)
    texts = generate_answers(loaded, PROMPTS, max_new_tokens=17)
    whole = measure_texts(loaded, tokens, texts)
    monkeypatch.setattr("ppd_runtime.measure.GROUP_ROWS", 7)
    parts = measure_texts(loaded, tokens, texts)
    assert [part.ranks for part in parts] == [part.ranks for part in whole]


def test_typical_acceptance_records_the_best_acceptable_guess(loaded: LoadedModel) -> None:
    tokens = prompt_tokens(loaded, m=2)
    typical = Typical(epsilon=0.05, delta=0.5)
    text = Text((3, 9, 4, 11, 2, 6), 2)
    (measured,) = measure_texts(loaded, tokens, [text], max_rank=5, typical=typical, temperature=0.7)
    own = loaded.model(torch.tensor([text.token_ids])).logits[0]
    for i in range(3):
        memory, _ = text_pass(loaded.model, torch.tensor(text.token_ids[: 2 + i]), slice(-1, None))
        guesses = group_logits(loaded.model, tokens.embeddings, memory, torch.tensor([1 + i]))[0]
        for j in (1, 2):
            if 2 + i + j >= 6:
                assert measured.ranks[i][j - 1] == 5
                continue
            share = (own[1 + i + j] / 0.7).softmax(-1)
            best = guesses[j - 1].topk(5).indices.tolist()
            acceptable = [rank for rank, token in enumerate(best) if share[token] > typical.threshold(share)]
            assert measured.ranks[i][j - 1] == (acceptable[0] if acceptable else 5)


def test_ranks_break_ties_by_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0]])
    assert [int(ranks_of(logits, torch.tensor([token]))) for token in range(4)] == [2, 0, 3, 1]


def test_what_cannot_be_measured_is_refused(loaded: LoadedModel) -> None:
    tokens = prompt_tokens(loaded)
    with pytest.raises(TrainingError, match=r"nothing to measure; raise max_new_tokens"):
        measure_texts(loaded, tokens, [Text((1, 2), 1)])
    broken = wrap_model(tiny_model("llama", vocab_size=23))
    broken.model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="logits are not finite"):
        measure_texts(broken, tokens, [Text((1, 2, 3, 4), 1)])


RESULTS = [
    TextRanks(((0, 1), (2, 0), (0, 3), (1, 3)), ((0.5, 0.1), (0.1, 0.5), (0.25, 0.0), (0.2, 0.0)), 2),
    TextRanks(((0, 1), (0, 3)), ((0.5, 0.1), (0.4, 0.0)), 1),
    TextRanks((), (), 0),
]


def test_tables_count_positions_whose_distances_are_all_inside() -> None:
    table = acceptance_table(RESULTS, model="m", source="s", max_rank=3, tokens_per_prompt_token=2)
    assert table.num_samples == 3
    assert table.marginals == ((2 / 3, 0.0, 1 / 3), (1 / 3, 2 / 3, 0.0))
    assert table.ranks == ((0, 1, 2), (2, 0, 1))
    assert table.tokens_per_prompt_token == 2
    assert all(low <= high for row in table.intervals for low, high in row)
    with pytest.raises(TrainingError, match="too short to measure every distance"):
        acceptance_table([replace(RESULTS[1], num_inside=0)], model="m", source="s", max_rank=3)


def test_rank_records_keep_every_entry_in_order() -> None:
    record = rank_record(RESULTS, model="m", source="s", max_rank=3)
    assert record.sequences == (RESULTS[0].ranks, RESULTS[1].ranks)
    assert record.probabilities == (RESULTS[0].probabilities, RESULTS[1].probabilities)
    assert rank_record(RESULTS, model="m", source="s", max_rank=3, with_probabilities=False).probabilities is None


def test_the_bootstrap_resamples_texts_not_positions() -> None:
    """Ten texts that are all right or all wrong: the spread is that of ten coin flips, not of a thousand."""
    counts = np.array([[[100]]] * 5 + [[[0]]] * 5)
    totals = np.full(10, 100)
    ((((low, high),),)) = (bootstrap_intervals(counts, totals),)[0]
    assert low == pytest.approx(0.2, abs=0.05)
    assert high == pytest.approx(0.8, abs=0.05)
    ((((low, high),),)) = (bootstrap_intervals(np.array([[[50]]] * 10), totals),)[0]
    assert (low, high) == (0.5, 0.5)
