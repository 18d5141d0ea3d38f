"""Measuring a model's answers, and drawing what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppd_runtime import Typical, random_prompt_tokens, save_prompt_tokens
from ppd_runtime.answers import generate_answers
from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.letters import letters
from tests.ppd_runtime.tiny import tiny_model
from treeopt.app import texts as texts_module
from treeopt.app.measure import accuracy_figure, choose_prompt_tokens, cumulative_intervals, measure
from treeopt.app.texts import answers_to, held_out_texts, shipped_prompts, training_texts
from treeopt.errors import ModelError, TrainingError
from treeopt.types import AcceptanceTable

PROMPTS = [[3, 4, 5, 6], [7], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama"), letters(), name="tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(texts_module, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_a_measurement_fills_two_documents_that_agree(loaded: LoadedModel) -> None:
    texts = generate_answers(loaded, PROMPTS, max_new_tokens=14)
    tokens = random_prompt_tokens(32, 2, 2, std=0.4)
    found = measure(loaded, tokens, texts, source="three prompts", max_rank=6)
    assert (found.table.model, found.table.source, found.table.rule) == ("tiny", "three prompts", "greedy")
    assert found.table.tokens_per_prompt_token == 2
    inside = [entry for sequence in found.record.sequences for entry in sequence[: 14 - 2]]
    assert found.table.num_samples == len(inside) == 3 * 12
    for j in range(2):
        for rank in range(6):
            share = sum(entry[j] == rank for entry in inside) / len(inside)
            assert found.table.marginals[j][rank] == pytest.approx(share)


def test_rules_follow_temperature_and_typical(loaded: LoadedModel) -> None:
    texts = generate_answers(loaded, PROMPTS, max_new_tokens=8, temperature=0.9)
    tokens = random_prompt_tokens(32, 2)
    assert measure(loaded, tokens, texts, source="s", temperature=0.9).table.rule == "sample"
    typical = measure(loaded, tokens, texts, source="s", temperature=0.9, typical=Typical())
    assert (typical.table.rule, typical.record.rule) == ("typical", "typical")
    with pytest.raises(TrainingError, match="typical: needs --temperature above 0"):
        measure(loaded, tokens, texts, source="s", typical=Typical())


def test_prompt_tokens_are_named_free_or_shipped(loaded: LoadedModel, tmp_path: Path) -> None:
    free = choose_prompt_tokens(loaded, "free")
    matrix = loaded.model.get_input_embeddings().weight
    assert (free.embeddings[0, 0] - matrix.mean(0)).abs().max() < 1e-6
    save_prompt_tokens(random_prompt_tokens(32, 3, seed=9), tmp_path / "tokens")
    assert choose_prompt_tokens(loaded, str(tmp_path / "tokens")).num_distances == 3
    with pytest.raises(TrainingError, match="no prompt tokens are shipped for it"):
        choose_prompt_tokens(loaded, None)
    save_prompt_tokens(random_prompt_tokens(16, 3), tmp_path / "other")
    with pytest.raises(ModelError, match="hidden size 16, tiny has 32"):
        choose_prompt_tokens(loaded, str(tmp_path / "other"))


def test_answers_are_kept_and_training_texts_come_from_prompts_or_files(loaded: LoadedModel, cache: Path) -> None:
    prompts = cache / "prompts.txt"
    prompts.write_text("abc\nxyz hi\n")
    options = {"max_new_tokens": 7, "temperature": 0.0, "seed": 0}
    texts = training_texts(loaded, prompts=str(prompts), data=None, **options)
    assert [text.token_ids[: text.num_prompt_tokens] for text in texts] == [(1, 2, 3), (24, 25, 26, 27, 8, 9)]
    assert texts == answers_to(loaded, ["abc", "xyz hi"], max_new_tokens=7)
    assert len(list((cache / "answers").iterdir())) == 1
    from_file = training_texts(loaded, prompts=None, data=str(prompts), **options)
    assert from_file[0].num_prompt_tokens == 1
    assert held_out_texts(replace(loaded, tokenizer=None), None, max_new_tokens=9) == []


def test_shipped_prompts_are_many_varied_and_none_is_in_both_files() -> None:
    from ppd_runtime import read_prompts

    train = read_prompts(shipped_prompts("prompts.jsonl"))
    held_out = read_prompts(shipped_prompts("prompts-held-out.jsonl"))
    assert len(train) > 400
    assert len(held_out) >= 40
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)


TABLE = AcceptanceTable(
    model="m",
    source="s",
    rule="greedy",
    temperature=0.0,
    num_samples=100,
    marginals=((0.5, 0.2), (0.25, 0.25)),
    intervals=(((0.402, 0.598), (0.1216, 0.2784)), ((0.1, 0.4), (0.1, 0.4))),
)


def test_cumulative_intervals_widen_with_the_design_effect() -> None:
    first, second = cumulative_intervals(TABLE)
    # Distance 1: the table's intervals are those of 100 independent positions.
    assert first[0] == pytest.approx((0.5, 0.402, 0.598), abs=1e-3)
    assert first[1] == pytest.approx(
        (0.7, 0.7 - 1.96 * (0.21 / 100) ** 0.5, 0.7 + 1.96 * (0.21 / 100) ** 0.5), abs=1e-3
    )
    # Distance 2: half width 0.15 where independence gives 1.96 * sqrt(0.1875 / 100) = 0.0849.
    half = 0.15 / 0.08487 * 1.96 * (0.25 / 100) ** 0.5
    assert second[1] == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-3)
    assert cumulative_intervals(AcceptanceTable.from_marginals([[0.5]])) is None


def test_the_figure_shows_accumulated_shares_per_distance() -> None:
    figure = accuracy_figure([("ours", TABLE), ("theirs", AcceptanceTable.from_marginals([[0.3, 0.1]]))])
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy, distance 1", "accuracy, distance 2"]
    ours, theirs = figure.axes[0].lines
    assert list(ours.get_ydata()) == pytest.approx([0.5, 0.7])
    assert list(theirs.get_ydata()) == pytest.approx([0.3, 0.4])
    assert len(figure.axes[1].lines) == 1
    with pytest.raises(TrainingError, match="one to four"):
        accuracy_figure([("t", TABLE)] * 5)
