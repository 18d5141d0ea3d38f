"""``treeopt profile`` and ``treeopt db`` as a shell sees them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from treeopt.artifact import document_digest, from_document, read_document
from treeopt.cli.db import app as db_app
from treeopt.cli.profile import app as profile_app
from treeopt.errors import TreeOptError
from treeopt.types import LatencyProfile

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 256,
}


def call(app, *words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit | TreeOptError):
        raise result.exception
    return result


def profile(*words: object) -> Result:
    return call(profile_app, *words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database that holds two measured curves of a tiny model."""
    folder = tmp_path_factory.mktemp("profiles")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEOPT_LOCK_DIR", str(folder / "locks"))
        result = profile(
            *("run", "--model", "toy", "--config", folder / "config.json", "--tokens", "1,2,4-5"),
            *("--contexts", "8,16", "--point-seconds", 0.02, "--device", "cpu", "--db", folder / "x.db", "--json"),
        )
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    return folder


@pytest.fixture(autouse=True)
def environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEOPT_DB", str(home / "x.db"))
    monkeypatch.setenv("TREEOPT_LOCK_DIR", str(home / "locks"))


def listed(*words: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in profile("list", "--json", *words).stdout.splitlines()]


def test_list_tells_everything_a_script_needs(home: Path) -> None:
    rows = listed()
    assert [row["context_len"] for row in rows] == [16, 8], "newest first"
    for row in rows:
        assert row["complete"] is True
        assert (row["model"], row["dtype"], row["batch_size"]) == ("toy", "float32", 1)
        assert row["grid"] == [1, 2, 4, 5]
        assert {"digest", "device", "flags", "age_s"} <= row.keys()
        assert isinstance(row["age_s"], float)
        assert row["age_s"] >= 0
    assert listed("--model", "other") == []
    table = profile("list").stdout
    assert str(rows[0]["digest"])[:12] in table


def test_show_prints_points_with_the_bare_forward(home: Path) -> None:
    digest = listed()[0]["digest"]
    shown = json.loads(profile("show", str(digest)[:8], "--json").stdout)
    assert [point["num_tokens"] for point in shown["points"]] == [1, 2, 4, 5]
    assert shown["points"][0]["ratio"] == 1.0
    assert all(point["median_s"] > 0 for point in shown["points"])
    assert shown["points"][2]["forward_s"] > 0
    assert "L(n)/L(1)" in profile("show", digest).stdout


def test_export_then_import_elsewhere_is_the_same_curve(home: Path, tmp_path: Path) -> None:
    digest = listed()[0]["digest"]
    target = tmp_path / "curve.json"
    assert profile("export", digest, "--out", target).exit_code == 0
    document = json.loads(target.read_text())
    assert document["format"] == "treeopt.latency/1"
    bare = {name: value for name, value in document.items() if name != "sha256"}
    assert document["sha256"] == document_digest(bare) == digest
    assert profile("export", digest).stdout == target.read_text()
    other = tmp_path / "other.db"
    for _ in range(2):
        result = profile("import", target, "--db", other)
        assert result.stdout.startswith(str(digest))
    (row,) = listed("--db", other)
    assert (row["digest"], row["origin"]) == (digest, "imported")
    assert read_document(target, LatencyProfile) == from_document(document, "x", LatencyProfile)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("sha256"), "sha256: missing, so it cannot be verified"),
        (lambda d: d["points"][0].update(median_s=0.5), "sha256: does not match"),
        (lambda d: d.update(colour="red"), "colour: unknown field"),
        (lambda d: d.update(format="treeopt.latency/2"), "format: version"),
    ],
)
def test_import_refuses_what_it_cannot_verify(home: Path, tmp_path: Path, change, said: str) -> None:
    document = json.loads(profile("export", listed()[0]["digest"]).stdout)
    change(document)
    source = tmp_path / "curve.json"
    source.write_text(json.dumps(document))
    result = profile("import", source, "--db", tmp_path / "other.db")
    assert result.exit_code != 0
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert listed("--db", tmp_path / "other.db") == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(complete=False), "complete: is false"),
        (lambda d: d["device"].update(name="A faster one"), "device.class_digest: does not match"),
        (lambda d: d["points"][0].update(median_s=-1.0), "points[0].median_s: must be above 0"),
        (lambda d: d["points"][0].update(samples_s=[0.0]), "points[0].samples_s[0]: must be above 0"),
        (lambda d: d["points"].pop(0), "points[0].num_tokens: is 2; the first point must be 1"),
    ],
)
def test_import_refuses_what_contradicts_itself(home: Path, tmp_path: Path, change, said: str) -> None:
    document = json.loads(profile("export", listed()[0]["digest"]).stdout)
    document.pop("sha256")
    change(document)
    document["sha256"] = document_digest(document)
    (tmp_path / "curve.json").write_text(json.dumps(document))
    result = profile("import", tmp_path / "curve.json", "--db", tmp_path / "other.db")
    assert said in str(result.exception)


def test_compare_is_relative_to_one_token(home: Path, tmp_path: Path) -> None:
    from datetime import UTC, datetime

    from db.profiles import add_profile
    from treeopt.app.profile_library import open_for_writing

    engine = open_for_writing(str(tmp_path / "two.db"))
    known = LatencyProfile.from_medians({1: 0.1, 4: 0.2, 8: 0.4})
    other = replace(LatencyProfile.from_medians({1: 0.2, 4: 0.4, 7: 1.0, 8: 1.2}), context_len=9)
    one, two = (str(add_profile(engine, p, datetime.now(UTC)).digest) for p in (known, other))
    rows = [
        json.loads(line)
        for line in profile("compare", one, two, "--db", tmp_path / "two.db", "--json").stdout.splitlines()
    ]
    assert [row["num_tokens"] for row in rows] == [1, 4, 8]
    assert [row["relative"] for row in rows] == pytest.approx([0.0, 0.0, 0.5])
    assert "2 of 3 points" in profile("compare", one, two, "--db", tmp_path / "two.db").stderr


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_plot_draws_one_line_per_context_with_error_bars(home: Path, tmp_path: Path, suffix: str, start: bytes) -> None:
    target = tmp_path / f"curve{suffix}"
    result = profile("plot", *(row["digest"] for row in listed()), "--out", target)
    assert result.exit_code == 0
    assert target.read_bytes().startswith(start)
    if suffix == ".svg":
        text = target.read_text()
        assert "context 8" in text
        assert "context 16" in text
        assert "LineCollection" in text, "the error bars"
    assert "draw" in str(profile("plot", listed()[0]["digest"], "--out", tmp_path / "x.docx").exception)


def test_forget_takes_exactly_one(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    assert call(db_app, "backup", copy).exit_code == 0
    first, second = (row["digest"] for row in listed())
    assert profile("forget", str(first)[:10], "--db", copy).exit_code == 0
    assert [row["digest"] for row in listed("--db", copy)] == [second]
    assert "is not in this database" in str(profile("show", first, "--db", copy).exception)


def test_the_queue_from_the_shell(tmp_path: Path) -> None:
    db = tmp_path / "queue.db"
    words = ("--model", "toy", "--device", "cpu", "--tokens", "1-4", "--window", "22:00-06:00", "--max-age", 30)
    assert profile("schedule", *words, "--priority", 3, "--db", db).stdout.startswith("job 1: queued")
    (job,) = [json.loads(line) for line in profile("jobs", "--json", "--db", db).stdout.splitlines()]
    assert (job["state"], job["priority"], job["window"], job["max_age_s"]) == ("queued", 3, "22:00-06:00", 30 * 86_400)
    assert job["spec"]["tokens"] == [1, 2, 3, 4]
    assert "toy" in profile("jobs", "--db", db).stdout
    assert profile("jobs", "--cancel", 1, "--db", db).exit_code == 0
    assert json.loads(profile("jobs", "--json", "--db", db).stdout)["state"] == "cancelled"
    assert "--window" in str(profile("schedule", *words[:6], "--window", "night", "--db", db).exception)


def test_watch_once_measures_what_is_queued(home: Path, tmp_path: Path) -> None:
    db = tmp_path / "queue.db"
    words = ("--model", "toy", "--config", home / "config.json", "--device", "cpu", "--tokens", "1,2", "--contexts", 8)
    profile("schedule", *words, "--db", db)
    result = profile(
        *("watch", "--once", "--dwell", 0, "--max-cpu", 1, "--on-battery", "--allow-unknown", "--device", "cpu"),
        *("--db", db),
    )
    assert result.exit_code == 0
    state = json.loads(profile("jobs", "--json", "--db", db).stdout)["state"]
    # Other programs on a shared machine may make it give way; then the job is queued again, never lost.
    assert state == "done" or "gave way" in result.stderr
    assert state in ("done", "queued")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--tokens", "4-1"),
        ("run", "--tokens", "one"),
        ("run", "--contexts", "64,,512"),
        ("run", "--max-tokens", "0"),
        ("schedule", "--max-age", "0"),
        ("show",),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2(words: tuple[str, ...]) -> None:
    assert profile(*words).exit_code == 2


def test_without_a_database_nothing_is_created(tmp_path: Path) -> None:
    db = tmp_path / "none.db"
    assert listed("--db", db) == []
    assert "no profiles yet" in profile("list", "--db", db).stderr
    assert "no jobs" in profile("jobs", "--db", db).stderr
    assert "there is no database yet" in str(profile("show", "abcd", "--db", db).exception)
    assert "there is no database yet" in str(call(db_app, "check", "--db", db).exception)
    assert json.loads(call(db_app, "current", "--json", "--db", db).stdout)["state"] == "empty"
    assert list(tmp_path.iterdir()) == []


def test_db_commands(home: Path, tmp_path: Path) -> None:
    db = tmp_path / "a" / "x.db"
    assert "schema v" in call(db_app, "upgrade", "--db", db).stdout
    facts = json.loads(call(db_app, "current", "--json", "--db", db).stdout)
    assert (facts["state"], facts["revision"]) == ("current", facts["newest"])
    assert call(db_app, "vacuum", "--db", db).exit_code == 0
    assert call(db_app, "check", "--db", db).exit_code == 0
    import sqlite3

    with sqlite3.connect(home / "x.db") as source, sqlite3.connect(tmp_path / "liar.db") as copy:
        source.backup(copy)
        copy.execute("DELETE FROM points WHERE num_tokens = 4 AND part = 'step'")
    result = call(db_app, "check", "--db", tmp_path / "liar.db")
    assert result.exit_code == 1
    assert result.stdout.count("lacks the points [4]") == 2
