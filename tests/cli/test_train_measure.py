"""``treeopt train`` and ``treeopt measure`` end to end on a tiny model."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from ppd_runtime.models import LoadedModel, wrap_model
from tests.ppd_runtime.letters import letters
from tests.ppd_runtime.tiny import tiny_model
from treeopt.app import runtime
from treeopt.app import texts as texts_module
from treeopt.artifact import read_document
from treeopt.cli.measure import measure
from treeopt.cli.train import train
from treeopt.errors import TreeOptError
from treeopt.replay import replay
from treeopt.search import search
from treeopt.types import AcceptanceTable, RankRecord

RUNNER = CliRunner()


@pytest.fixture
def command() -> typer.Typer:
    command = typer.Typer(rich_markup_mode=None)
    command.command("train")(train)
    command.command("measure")(measure)
    return command


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoadedModel:
    loaded = wrap_model(tiny_model("llama", dtype=torch.float32), letters(), name="tiny")
    monkeypatch.setattr(runtime, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(texts_module, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "prompts.txt").write_text("abc\nhello there\nxyz\n")
    return loaded


def options(folder: Path) -> list[str]:
    prompts = str(folder / "prompts.txt")
    sizes = ["--max-new-tokens", "14", "--steps", "4", "--groups", "5"]
    return ["train", "--out", str(folder / "run"), "--prompts", prompts, "--held-out", prompts, *sizes]


def test_train_then_measure_then_search(command: typer.Typer, tmp_path: Path) -> None:
    trained = RUNNER.invoke(command, options(tmp_path))
    assert trained.exit_code == 0, trained.output
    assert "96 parameters learnt" in trained.output
    assert "distance 3" in trained.output
    arguments = ["--prompt-tokens", str(tmp_path / "run"), "--prompts", str(tmp_path / "prompts.txt")]
    files = ["--out", str(tmp_path / "table.json"), "--ranks", str(tmp_path / "ranks.json")]
    plot = ["--plot", str(tmp_path / "accuracy.svg"), "--compare", "vicuna-7b-m3"]
    measured = RUNNER.invoke(command, ["measure", *arguments, *files, *plot, "--max-new-tokens", "14"])
    assert measured.exit_code == 0, measured.output
    table = read_document(tmp_path / "table.json", AcceptanceTable)
    record = read_document(tmp_path / "ranks.json", RankRecord)
    assert table.source == "treeopt measure, prompts.txt: 3 prompts (chat template), up to 14 new tokens, float32"
    assert table.num_samples == 3 * 11
    assert (tmp_path / "accuracy.svg").read_text().count("vicuna-7b-m3") >= 1
    replayed = replay(search(table, 6), record)
    assert sum(replayed.steps_per_state) > 0


def test_json_prints_log_lines_and_the_table_and_nothing_else(command: typer.Typer, tmp_path: Path) -> None:
    trained = RUNNER.invoke(command, [*options(tmp_path), "--json"])
    events = [json.loads(line)["event"] for line in trained.stdout.splitlines()]
    assert events == ["start", "step", "step", "step", "step", "evaluation", "done"]
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    measured = RUNNER.invoke(
        command, ["measure", "--prompt-tokens", "free", *prompts, "--max-new-tokens", "14", "--max-rank", "4", "--json"]
    )
    document = json.loads(measured.stdout)
    assert document["format"] == "treeopt.acceptance/1"
    assert len(document["marginals"][0]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "--typical"], "needs --temperature above 0"),
        (["measure", "--compare", "vicuna-7b-m3"], "needs --plot FILE"),
        (["measure", "--plot", "a.txt"], "must end in .png, .svg or .pdf"),
        (["train", "--out", "x", "--prompts", "a", "--data", "b"], "either --prompts or --data"),
        (["train", "--out", "x", "--loss", "mse"], "distillation or labels"),
        (["train", "--out", "x", "--distances", "9"], "less than or equal to 8"),
    ],
)
def test_wrong_usage_is_said_before_anything_loads(command: typer.Typer, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_problems_with_files_are_one_line(command: typer.Typer, tmp_path: Path) -> None:
    for arguments, message in (
        (["measure", "--prompts", str(tmp_path / "none.txt")], "none.txt: cannot be read"),
        (["measure", "--prompts", str(tmp_path / "prompts.txt")], "no prompt tokens are shipped for it"),
        (["train", "--out", str(tmp_path / "run"), "--data", str(tmp_path / "none.txt")], "none.txt: cannot be read"),
        (["train", "--out", str(tmp_path / "run"), "--learning-rate", "0"], "learning_rate: must be above 0"),
    ):
        result = RUNNER.invoke(command, arguments)
        assert isinstance(result.exception, TreeOptError)
        assert message in str(result.exception)
        assert "\n" not in str(result.exception)
