"""A training run in its folder: log, curve, checkpoints, and going on after a kill."""

import json
from pathlib import Path

import pytest
import torch

from ppd_runtime.answers import Text, generate_answers
from ppd_runtime.models import LoadedModel, wrap_model
from ppd_runtime.token_files import load_prompt_tokens
from ppd_runtime.train import TrainingPlan
from tests.ppd_runtime.tiny import tiny_model
from treeopt import artifact
from treeopt.app.train import TOPS, Crew, crew, digest_of, loss_figure, train_prompt_tokens
from treeopt.errors import DocumentError, TrainingError

PLAN = TrainingPlan(num_steps=6, texts_per_step=2, groups_per_text=4, learning_rate=0.05, start="vocabulary")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(tiny_model("llama", dtype=torch.float32), name="tiny")


@pytest.fixture(scope="module")
def texts(loaded: LoadedModel) -> list[Text]:
    return generate_answers(loaded, [[3, 4, 5], [7, 9], [20, 21, 22, 23], [40]], max_new_tokens=12)


def test_a_run_leaves_prompt_tokens_a_log_and_a_curve(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    entries: list[dict[str, object]] = []
    report = train_prompt_tokens(
        loaded,
        PLAN,
        texts[:3],
        tmp_path / "run",
        held_out=texts[3:],
        record={"command": "treeopt train"},
        save_every=2,
        evaluate_every=3,
        report=entries.append,
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "log.jsonl",
        "loss.png",
    ]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log == json.loads(json.dumps(entries))
    assert [entry["event"] for entry in log] == [
        "start", "step", "step", "step", "evaluation", "step", "step", "step", "evaluation", "done",
    ]  # fmt: skip
    assert [entry["loss"] for entry in log if entry["event"] == "step"] == list(report.losses)
    tokens = load_prompt_tokens(tmp_path / "run", hidden_size=32, base_model="tiny", base_digest=loaded.digest)
    assert torch.equal(tokens.embeddings, report.tokens.embeddings)
    assert tokens.training["command"] == "treeopt train"
    assert tokens.training["plan"]["learning_rate"] == 0.05
    assert tokens.training["data_digest"] == digest_of(texts[:3])
    assert report.num_trainable == 3 * 32
    assert report.num_model == sum(parameter.numel() for parameter in loaded.model.parameters())
    assert report.num_bytes / report.num_model_bytes == pytest.approx(report.num_trainable / report.num_model)
    assert len(report.top) == 3
    assert all(len(row) == len(TOPS) and list(row) == sorted(row) for row in report.top)


def test_a_killed_run_goes_on_to_the_same_result(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    whole = train_prompt_tokens(loaded, PLAN, texts, tmp_path / "whole")

    def kill(entry: dict[str, object]) -> None:
        if entry.get("step") == 5 and entry["event"] == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_prompt_tokens(loaded, PLAN, texts, tmp_path / "killed", save_every=2, report=kill)
    assert (tmp_path / "killed" / "checkpoint.safetensors").exists()
    steps: list[object] = []
    resumed = train_prompt_tokens(
        loaded, PLAN, texts, tmp_path / "killed", save_every=2, report=lambda entry: steps.append(entry.get("step"))
    )
    assert steps[:2] == [4, 5]
    assert torch.equal(resumed.tokens.embeddings, whole.tokens.embeddings)
    assert resumed.losses == whole.losses
    assert not (tmp_path / "killed" / "checkpoint.safetensors").exists()


def test_other_data_does_not_continue_a_run(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    def kill(entry: dict[str, object]) -> None:
        if entry.get("step") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_prompt_tokens(loaded, PLAN, texts, tmp_path, save_every=1, report=kill)
    with pytest.raises(DocumentError, match="belongs to a run with another data_digest"):
        train_prompt_tokens(loaded, PLAN, texts[:2], tmp_path)


def test_a_full_disk_keeps_the_last_good_checkpoint(
    loaded: LoadedModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_prompt_tokens(loaded, PLAN, texts, tmp_path / "whole")

    def fill(entry: dict[str, object]) -> None:
        if entry.get("step") == 3:
            monkeypatch.setattr(artifact.os, "fsync", full)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DocumentError, match=r"checkpoint\.safetensors.*No space left on device"):
        train_prompt_tokens(loaded, PLAN, texts, tmp_path / "run", save_every=2, report=fill)
    monkeypatch.undo()
    again = train_prompt_tokens(loaded, PLAN, texts, tmp_path / "run", save_every=2)
    assert torch.equal(again.tokens.embeddings, whole.tokens.embeddings)


def test_a_run_that_turns_to_nan_keeps_its_checkpoint(texts: list[Text], tmp_path: Path) -> None:
    loaded = wrap_model(tiny_model("llama", dtype=torch.float32), name="tiny")

    def spoil(entry: dict[str, object]) -> None:
        if entry.get("step") == 4:
            loaded.model.model.norm.weight.data.fill_(float("nan"))

    with pytest.raises(TrainingError, match="step 5: the loss is nan"):
        train_prompt_tokens(loaded, PLAN, texts, tmp_path, save_every=2, report=spoil)
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_nothing_to_train_on_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="none has two new tokens"):
        train_prompt_tokens(loaded, PLAN, [], tmp_path)


def test_only_the_first_of_several_processes_writes(loaded: LoadedModel, texts: list[Text], tmp_path: Path) -> None:
    team = Crew(rank=1, size=2, reduce_mean=lambda gradient: gradient)
    train_prompt_tokens(loaded, PLAN, texts, tmp_path, team=team)
    assert list(tmp_path.iterdir()) == []


def test_a_process_on_its_own_needs_no_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert crew() == Crew()


def test_the_loss_curve_shows_every_step_and_its_running_mean() -> None:
    figure = loss_figure([4.0, 2.0, 3.0], "m = 3", window=2)
    every, means = figure.axes[0].lines[:2]
    assert list(every.get_ydata()) == [4.0, 2.0, 3.0]
    assert list(means.get_ydata()) == [4.0, 3.0, 2.5]
    assert figure.axes[0].get_ylabel() == "loss (nats)"
