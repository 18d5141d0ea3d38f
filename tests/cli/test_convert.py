"""``treeopt export``, ``treeopt import`` and ``treeopt search --target``, as they are typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treeopt.app.convert import EXPORT_FORMATS, IMPORT_FORMATS
from treeopt.app.target import TARGETS
from treeopt.artifact import write_document
from treeopt.formats.choices import design_from_paths
from treeopt.types import AcceptanceTable, LatencyProfile

CHAIN = [(0,), (0, 0)]
BUSHY = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def treeopt(*arguments, text=True):
    command = [sys.executable, "-c", "from treeopt.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=text, timeout=120)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    write_document(design_from_paths(CHAIN), folder / "chain.json")
    write_document(design_from_paths(BUSHY), folder / "bushy.json")
    write_document(AcceptanceTable.from_marginals([[0.6, 0.2], [0.5, 0.1]]), folder / "table.json")
    write_document(LatencyProfile.from_medians({1: 0.5, 2: 0.625, 4: 1.0}), folder / "latency.json")
    return folder


@pytest.mark.parametrize(
    ("document", "to", "text"),
    [
        ("chain", "medusa", "[[0], [0, 0]]"),
        ("bushy", "eagle", "[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]"),
        ("bushy", "vllm", "[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]"),
        ("chain", "llama.cpp", "--spec-draft-n-max 2 --spec-draft-p-min 0"),
        ("bushy", "sglang", "--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7"),
        (
            "bushy",
            "tensorrt-llm",
            '{"max_draft_len": 2, "max_total_draft_tokens": 6, "dynamic_tree_max_topK": 3}',
        ),
        ("latency", "llama.cpp-costs", "1,0.625"),
        (
            "latency",
            "dspark",
            '{"sample_batch_tokens": [1, 2, 4], "sample_steps_per_sec": [2.0, 1.6, 1.0], "max_batch_tokens": 4}',
        ),
    ],
)
def test_export_prints_the_syntax_and_nothing_else(documents, document, to, text):
    done = treeopt("export", documents / f"{document}.json", "--to", to)
    assert (done.returncode, done.stdout, done.stderr) == (0, text + "\n", "")


@pytest.mark.parametrize(
    ("to", "suffix"), [("sequoia", "pt"), ("umbrella", "json"), ("medusa", "txt"), ("vllm", "txt")]
)
def test_what_is_exported_is_imported_as_the_same_document(documents, tmp_path, to, suffix):
    file = tmp_path / f"tree.{suffix}"
    if to == "sequoia":
        file.write_bytes(treeopt("export", documents / "bushy.json", "--to", to, text=False).stdout)
    else:
        assert treeopt("export", documents / "bushy.json", "--to", to, "--out", file).returncode == 0
    back = treeopt("import", file, "--from", to)
    assert json.loads(back.stdout) == json.loads((documents / "bushy.json").read_text())
    assert back.stderr == ""


def test_jetspec_profile_there_and_back(documents, tmp_path):
    file = tmp_path / "profile.json"
    assert treeopt("export", documents / "table.json", "--to", "jetspec", "--out", file).returncode == 0
    assert treeopt("import", file, "--from", "jetspec", "--out", tmp_path / "back.json").returncode == 0
    back = json.loads((tmp_path / "back.json").read_text())
    assert back.pop("tokens_per_prompt_token") == 0
    assert back == json.loads((documents / "table.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("export", "bushy.json", "--to", "llama.cpp"), "branches"),
        (("export", "table.json", "--to", "medusa"), "expected treeopt.tree/1"),
        (("export", "bushy.json", "chain.json", "--to", "medusa"), "takes one document"),
        (("import", "chain.json", "--from", "sequoia"), "holds code"),
        (("import", "chain.json", "--from", "sequoia-vector"), "--distances"),
    ],
)
def test_problems_are_one_line_and_leave_stdout_empty(documents, arguments, problem):
    done = treeopt(*(documents / item if item.endswith(".json") else item for item in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("treeopt: ")
    assert done.stderr.count("\n") == 1
    assert problem in done.stderr


def test_an_unknown_format_is_wrong_usage(documents):
    assert treeopt("export", documents / "chain.json", "--to", "hydra2").returncode == 2
    assert treeopt("import", documents / "chain.json", "--from", "hydra2").returncode == 2


def test_help_names_every_format():
    for command, formats in (("export", EXPORT_FORMATS), ("import", IMPORT_FORMATS)):
        shown = " ".join(treeopt(command, "--help").stdout.split())
        assert f"Formats: {', '.join(formats)}." in shown


def test_docs_list_what_each_format_can_do():
    docs = Path(__file__).parents[2] / "docs" / "formats.md"
    rows = [line.split("|")[1:-1] for line in docs.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {name.strip(" `"): [bool(cell.strip()) for cell in cells] for name, _, *cells in rows}
    can = {
        name: [name in EXPORT_FORMATS, name in IMPORT_FORMATS, name in TARGETS]
        for name in {*EXPORT_FORMATS, *IMPORT_FORMATS, *TARGETS}
    }
    assert listed == can


def test_search_target_prints_the_syntax_and_nothing_else(documents):
    done = treeopt(
        "search", "--acceptance", documents / "table.json", "--latency", "none", "--budget", 4, "--target", "medusa"
    )
    assert (done.returncode, done.stdout) == (0, "[[0], [1], [0, 0]]\n")
