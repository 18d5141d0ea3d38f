"""``treeopt generate`` on a tiny model saved to a folder."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from ppd_runtime import load_model, random_prompt_tokens, save_prompt_tokens
from tests.ppd_runtime.designs import DEEP, uniform_design
from tests.ppd_runtime.tiny import tiny_model
from tests.ppd_runtime.tokenizers import CHAT_TEMPLATE, VOCAB_SIZE, byte_tokenizer
from treeopt.app.generate import plan_decoding, statistics
from treeopt.artifact import write_document
from treeopt.cli.generate import generate
from treeopt.errors import DecodeError, DocumentError
from treeopt.types import DecodeRun

app = typer.Typer()
app.command()(generate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=VOCAB_SIZE, dtype=torch.float32).save_pretrained(path)
    byte_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(path)
    save_prompt_tokens(random_prompt_tokens(32, 3, std=0.3), path / "tokens")
    write_document(DEEP, path / "deep.json")
    write_document(uniform_design(2, [(0,), (0, 0)], e=0), path / "lookup.json")
    (path / "prompts.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    return path


def run(folder: Path, *arguments: str):
    common = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "12"]
    return CliRunner().invoke(app, [*arguments, *common])


def lines(result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_lines_have_the_promised_fields_and_every_way_writes_the_same_tokens(folder: Path) -> None:
    tree, tokens = ["--tree", str(folder / "deep.json")], ["--prompt-tokens", str(folder / "tokens")]
    (plain,) = lines(run(folder, "hello", "--json", "--tree", "none"))
    assert list(plain) == ["prompt_token_ids", "token_ids", "text", "num_steps", "seconds", "finish_reason"]
    assert (plain["num_steps"], plain["finish_reason"], len(plain["token_ids"])) == (11, "length", 12)
    for ways in (
        [*tree, *tokens],
        [*tree, "--guesses", "free"],
        tree,
        tokens,
        ["--guesses", "free"],
        ["--guesses", "lookup", "--tree", str(folder / "lookup.json")],
        ["--tree", str(folder / "lookup.json")],
        [],
        ["--cache", "static"],
    ):
        (result,) = lines(run(folder, "hello", "--json", *ways))
        assert result["token_ids"] == plain["token_ids"], ways


def test_many_prompts_come_out_in_order_alone_or_in_batches(folder: Path) -> None:
    prompts = ["--prompts", str(folder / "prompts.txt"), "--json"]
    alone = lines(run(folder, *prompts))
    together = lines(run(folder, *prompts, "--batch-size", "2"))
    assert len(alone) == 3
    for key in ("prompt_token_ids", "token_ids", "text", "finish_reason"):
        assert [each[key] for each in alone] == [each[key] for each in together]
    assert [bytes(each["text"], "utf-8") for each in alone]


def test_people_get_text_on_stdout_and_figures_on_stderr(folder: Path) -> None:
    result = run(folder, "hello", "--stats")
    (document,) = lines(run(folder, "hello", "--json"))
    assert result.exit_code == 0
    assert result.stdout == document["text"] + "\n"
    for name in ("steps", "tokens per step", "(expected", "tokens per second", "state occupancy"):
        assert name in result.stderr


def test_the_record_of_a_run_comes_with_json_when_asked(folder: Path) -> None:
    (document,) = lines(run(folder, "hello", "--json", "--stats"))
    assert document["run"]["format"] == "treeopt.run/1"
    assert document["run"]["num_steps"] == document["num_steps"]


def test_raw_leaves_out_the_chat_template(folder: Path) -> None:
    (chat,) = lines(run(folder, "hi", "--json"))
    (raw,) = lines(run(folder, "hi", "--json", "--raw"))
    assert len(chat["prompt_token_ids"]) == len(raw["prompt_token_ids"]) + 3


def test_seeds_make_sampling_repeatable(folder: Path) -> None:
    def sample(seed: str) -> object:
        return lines(run(folder, "hi", "--json", "--temperature", "1", "--seed", seed))[0]["token_ids"]

    assert sample("1") == sample("1") != sample("2")


def test_sampled_texts_do_not_depend_on_the_size_of_the_batch(folder: Path) -> None:
    prompts = folder / "same.txt"
    prompts.write_text("hello\n" * 3, encoding="utf-8")

    def sampled(batch_size: int) -> list[list[int]]:
        words = ("--prompts", str(prompts), "--json", "--temperature", "1", "--batch-size", str(batch_size))
        return [line["token_ids"] for line in lines(run(folder, *words))]

    alone = sampled(1)
    assert alone == sampled(3)
    assert len({tuple(ids) for ids in alone}) == 3, "each text has random numbers of its own"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["hello", "--prompts", "file"],
        ["hello", "--guesses", "magic"],
        ["hello", "--dtype", "int8"],
        ["hello", "--typical"],
        ["hello", "--top-p", "0"],
        ["hello", "--top-p", "0.5"],
        ["hello", "--top-k", "5"],
        ["hello", "--tree", "none", "--budget", "8"],
        ["hello", "--tree", "none", "--guesses", "lookup"],
        ["hello", "--guesses", "lookup", "--prompt-tokens", "folder"],
        ["hello", "--temperature", "-1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(folder: Path, arguments: list[str]) -> None:
    assert run(folder, *arguments).exit_code == 2


def test_parts_that_do_not_fit_are_errors_with_a_remedy(folder: Path) -> None:
    result = run(folder, "hi", "--tree", str(folder / "lookup.json"), "--guesses", "free")
    assert isinstance(result.exception, DecodeError)
    result = run(folder, "hi", "--guesses", "prompt")
    assert isinstance(result.exception, DocumentError)
    assert "give --prompt-tokens, or use --guesses free or lookup" in str(result.exception)


def test_the_default_tree_fits_the_guesses(folder: Path) -> None:
    loaded = load_model(str(folder), device="cpu")
    lookup = plan_decoding(loaded)
    assert (lookup.source.name, lookup.design.tokens_per_prompt_token) == ("lookup", 0)
    prompt = plan_decoding(loaded, prompt_tokens=str(folder / "tokens"), budget=20)
    assert (prompt.source.name, prompt.design.budget, prompt.design.num_distances) == ("prompt", 20, 3)
    free = plan_decoding(loaded, guesses="free")
    assert max(free.design.pass_tokens) <= 8


def test_totals_are_ratios_of_sums_and_a_batch_takes_its_slowest_text() -> None:
    def record(steps: int, tokens: int, decode_s: float) -> DecodeRun:
        return DecodeRun("m", "none", None, 3, tokens, steps, (steps,), 0.5, decode_s, "length", decode_s / 2)

    runs = [record(4, 5, 2.0), record(10, 21, 3.0), record(1, 2, 10.0)]
    alone, pairs = statistics(runs, None), statistics(runs, None, batch_size=2)
    assert alone.tokens_per_second == pytest.approx((4 + 20 + 1) / 15)
    assert pairs.tokens_per_second == pytest.approx(25 / 13)
    assert alone.tokens_per_step == pytest.approx(25 / 15)
    assert (alone.prefill_s, pairs.prefill_s) == (1.5, 1.0)
    assert statistics([], None).tokens_per_second is None
