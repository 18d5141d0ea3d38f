"""Documents: re-read equal, digests, and one clear line for everything that is wrong with a file."""

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt import (
    AcceptanceTable,
    DecodeRun,
    LatencyPoint,
    LatencyProfile,
    RankRecord,
    SparseTree,
    SwitchEntry,
    SwitchTable,
    TreeDesign,
    read_document,
    search,
    write_document,
)
from treeopt.artifact import (
    canonical_json,
    digest,
    document_digest,
    from_document,
    read_json,
    read_with_digest,
    to_document,
    write_bytes,
    write_text,
)
from treeopt.bundled import bundled_tables, load_acceptance
from treeopt.errors import DocumentError, InvalidValueError

TABLE = AcceptanceTable(
    model="m",
    source="s",
    rule="greedy",
    temperature=0.0,
    num_samples=10,
    marginals=((0.6, 0.2), (0.5, 0.1)),
    ranks=((0, 0, 4), (0, 1, 1), (0, 2, 1), (1, 0, 1), (1, 2, 1), (2, 2, 2)),
    intervals=(((0.5, 0.7), (0.1, 0.3)), ((0.4, 0.6), (0.0, 0.2))),
    calibration={"kind": "none", "bins": [1, 2]},
)
PROFILE = LatencyProfile(
    device={"name": "cpu", "threads": 2},
    model="m",
    dtype="float32",
    batch_size=1,
    context_len=64,
    attention="sdpa",
    graph_mode="eager",
    points=(LatencyPoint(1, 0.1, 0.01, 2, (0.1, 0.11)), LatencyPoint(4, 0.09)),
    versions={"torch": "2"},
    flags=("noisy",),
)
RECORD = RankRecord("m", "s", "sample", 0.7, 2, (((0, 1), (2, 2)),), (((0.5, 0.1), (0.0, 0.0)),))
DESIGN = search(TABLE, 8, PROFILE)
RUN = DecodeRun("m", "prompt", "ab" * 32, 5, 9, 4, (0, 1, 3), 0.1, 0.4, "eos")
SWITCH = SwitchTable(
    (SwitchEntry(1, 128, DESIGN), SwitchEntry(1, 1024, search(TABLE, 1)), SwitchEntry(4, 1024, DESIGN))
)
VALUES = [TABLE, PROFILE, RECORD, DESIGN, SWITCH, RUN]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_written_and_read_again_is_equal(value, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_document(value, path)
    assert read_document(path, type(value)) == value
    assert read_document(path) == value
    assert [p.name for p in tmp_path.iterdir()] == ["document.json"]


rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(0, 1 / width), min_size=width, max_size=width).map(tuple), min_size=1, max_size=4
    ).map(tuple)
)


@given(rows, st.integers(0, 3), st.integers(1, 30))
def test_any_table_and_its_design_survive_json(marginals, e: int, budget: int) -> None:
    table = AcceptanceTable.from_marginals(marginals, tokens_per_prompt_token=e)
    for value in (table, search(table, budget)):
        document = json.loads(json.dumps(to_document(value)))
        assert from_document(document, "x") == value
        assert document_digest(document) == digest(value)


def test_digest_is_of_the_canonical_json() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None]}) == '{"a":[1.5,null],"b":1}'
    assert document_digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_digest_of_a_file_keeps_spelled_out_defaults(tmp_path: Path) -> None:
    document = {**to_document(TABLE), "tokens_per_prompt_token": 1}
    (tmp_path / "a.json").write_text(json.dumps(document, indent=3))
    table, found = read_with_digest(tmp_path / "a.json", AcceptanceTable)
    assert table == TABLE
    assert found == document_digest(document) != digest(TABLE)


def test_bundled_tables_state_their_source() -> None:
    assert {"vicuna-7b-m3", "vicuna-7b-m2", "vicuna-13b-m3", "mobilellama-1.4b-m3", "vicuna-68m-m3"} <= set(
        bundled_tables()
    )
    for name in bundled_tables():
        table, _ = load_acceptance(name)
        assert len(table.source) > 20
    with pytest.raises(DocumentError, match=r"^nothing-here: no such file, and no bundled table; the bundled ones: "):
        load_acceptance("nothing-here")


def broken(document: dict, *path, value=...) -> dict:
    """Set, or with no value delete, one place of a document."""
    document = copy.deepcopy(document)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


T, L, R, D, S = (to_document(value) for value in (TABLE, PROFILE, RECORD, DESIGN, SWITCH))
BROKEN = [
    (broken(T, "extra", value=1), r"f: extra: unknown field"),
    (broken(T, "model"), r"f: model: missing; treeopt.acceptance/1 requires it"),
    (broken(T, "model", value=3), r"f: model: input should be a valid string, not 3"),
    (broken(T, "rule", value="lucky"), r"f: rule: must be one of greedy, sample, typical"),
    (broken(T, "temperature", value=-1.0), r"f: temperature: must be at least 0"),
    (broken(T, "num_samples", value=True), r"f: num_samples: .*not True"),
    (broken(T, "num_samples", value=10**400), r"f: num_samples: must be at most 9223372036854775807, not 1000"),
    (broken(T, "ranks", 0, 2, value=10**400), r"f: ranks\[0\]\[2\]: must be at most 9223372036854775807, not 1000"),
    (broken(T, "tokens_per_prompt_token", value=10**30), r"f: tokens_per_prompt_token: must be at most 4096"),
    (broken(T, "model", value="x\x1b[31m"), r"f: model: must be one line without control characters, not 'x\\x1b"),
    (broken(T, "source", value="x\ny"), r"f: source: must be one line without control characters, not 'x\\ny'"),
    (broken(T, "model", value="\ud800"), r"f: model: must be one line without control characters, not '\\ud800'"),
    (broken(T, "k" * 10**6, value=1), r"f: 'k{116}\.\.\.: unknown field"),
    (broken(T, "a\nb", value=1), r"f: 'a\\nb': unknown field"),
    (broken(T, "num_samples", value=9), r"f: ranks: counts add up to 10, num_samples is 9"),
    (broken(T, "marginals", value=[]), r"f: marginals: is empty"),
    (broken(T, "marginals", value=[[]]), r"f: marginals\[0\]: is empty"),
    (broken(T, "marginals", value=[[0.5], [0.1, 0.1]]), r"f: marginals\[1\]: has 2 ranks where the first row has 1"),
    (broken(T, "marginals", 0, 0, value=True), r"f: marginals\[0\]\[0\]: .*not True"),
    (broken(T, "marginals", 0, 0, value=math.nan), r"f: marginals\[0\]\[0\]: .*finite"),
    (broken(T, "marginals", 0, 0, value=math.inf), r"f: marginals\[0\]\[0\]: .*finite"),
    (broken(T, "marginals", 0, 0, value=-0.1), r"f: marginals\[0\]\[0\]: must be at least 0"),
    (broken(T, "marginals", 0, 0, value="0.5"), r"f: marginals\[0\]\[0\]: .*number"),
    (broken(T, "marginals", 0, 0, value=0.81), r"f: marginals\[0\]: sums to 1.01, above 1"),
    (
        broken(T, "marginals", 0, 0, value=0.61),
        r"f: marginals\[0\]\[0\]: is 0.61 but the joint counts in ranks give 0.6",
    ),
    (broken(T, "ranks", 0, value=[0, 4]), r"f: ranks\[0\]: has 2 entries; give 2 ranks and a count"),
    (broken(T, "ranks", 0, 0, value=3), r"f: ranks\[0\]\[0\]: must be at most 2"),
    (broken(T, "ranks", 1, value=[0, 0, 1]), r"f: ranks\[1\]: repeats the ranks \[0, 0\]"),
    (broken(T, "ranks", 0, 2, value=0), r"f: ranks\[0\]\[2\]: must be at least 1"),
    (broken(T, "intervals", value=[[[0, 1]]]), r"f: intervals: must have 2 rows of 2"),
    (broken(T, "intervals", 0, 0, value=[0.9, 0.1]), r"f: intervals\[0\]\[0\]: low 0.9 is above high 0.1"),
    (broken(T, "calibration", "x", value=math.nan), r"f: holds NaN"),
    (broken(T, "format", value="treeopt.acceptance/2"), r"f: format: version 'treeopt.acceptance/2' is not one"),
    (broken(T, "format"), r"f: format: is None; expected"),
    (broken(L, "points", 0, "num_tokens", value=2), r"f: points\[0\].num_tokens: is 2; the first point must be 1"),
    (broken(L, "points", 1, "num_tokens", value=1), r"f: points\[1\].num_tokens: is 1 after 1; sort"),
    (broken(L, "points", value=[]), r"f: points: is empty"),
    (broken(L, "points", 1, "median_s", value=0), r"f: points\[1\].median_s: must be above 0"),
    (broken(L, "points", 1, "median_s", value=1e-300), r"f: points\[1\].median_s: must be at least 1e-12"),
    (broken(L, "points", 1, "median_s", value=1e300), r"f: points\[1\].median_s: must be at most 1000000000"),
    (broken(L, "device", "name", value="\x07"), r"f: device.name: must be one line without control characters"),
    (broken(L, "points", 0, "samples_s", value=[0.1]), r"f: points\[0\].num_samples: is 2 but samples_s holds 1"),
    (broken(L, "points", 0, "nap", value=1), r"f: points\[0\].nap: unknown field"),
    (broken(L, "device", value={}), r"f: device.name: must be a non-empty text"),
    (broken(L, "batch_size", value=1.0), r"f: batch_size: .*integer"),
    (broken(L, "sha256", value="0" * 64), r"f: sha256: does not match the content"),
    (broken(R, "sequences", 0, 0, value=[0]), r"f: sequences: mixes entries of \[1, 2\] ranks"),
    (broken(R, "sequences", 0, 0, 0, value=3), r"f: sequences\[0\]\[0\]\[0\]: must be at most 2"),
    (broken(R, "sequences", value=[[]]), r"f: sequences: holds no position"),
    (broken(R, "probabilities", value=[[[0.1, 0.2]]]), r"f: probabilities: must have the shape of sequences"),
    (broken(D, "states", "2"), r"f: pass_tokens: must name the states 0 to m"),
    (broken(D, "states", "0", value=[]), r"f: states.0\[0\]: must be the root"),
    (
        broken(D, "states", "1", value=[{"path": [], "prompt_tokens": 0}, {"path": [0, 0], "prompt_tokens": 0}]),
        r"f: states.1\[1\]: path \[0, 0\] has no parent",
    ),
    (
        broken(D, "states", "1", value=[{"path": [], "prompt_tokens": 0}, *[{"path": [0], "prompt_tokens": 0}] * 2]),
        r"f: states.1\[2\]: repeats the path \[0\]",
    ),
    (
        broken(D, "states", "0", value=[{"path": [], "prompt_tokens": 0}, {"path": [0], "prompt_tokens": 0}]),
        r"f: states.0: has a candidate at depth 1",
    ),
    (broken(D, "states", "0", value=[{"path": [], "prompt_tokens": 3}]), r"f: states.0\[0\].prompt_tokens: must be at"),
    (broken(D, "pass_tokens", "2", value=1), r"f: pass_tokens.2: must be at least"),
    (broken(D, "budget", value=None), r"f: budget: may be null only for method imported"),
    (broken(D, "upper_bound", value=0), r"f: upper_bound: must be above 0"),
    (broken(S, "entries", value=[]), r"f: entries: is empty; give at least one design"),
    (broken(S, "entries", 0, "batch_max", value=0), r"f: entries\[0\].batch_max: must be at least 1"),
    (broken(S, "entries", 0, "context_max", value=0), r"f: entries\[0\].context_max: must be at least 1"),
    (broken(S, "entries", 0, "context_max", value=1.5), r"f: entries\[0\].context_max: .*not 1.5"),
    (broken(S, "entries", 0, "context_max"), r"f: entries\[0\].context_max: missing"),
    (broken(S, "entries", 0, "depth", value=1), r"f: entries\[0\].depth: unknown field"),
    (
        broken(S, "entries", 1, "context_max", value=128),
        r"f: entries\[1\]: has batch_max 1, context_max 128 after 1, 128",
    ),
    (
        broken(S, "entries", 2, "context_max", value=64),
        r"f: entries\[2\]: batch_max 4 ends at context_max 64, others at",
    ),
    (broken(S, "entries", 1, "tree", "pass_tokens", "2", value=-1), r"f: entries\[1\].tree.pass_tokens.2: must be at"),
    (
        broken(S, "entries", 1, "tree", "format", value="treeopt.tree/2"),
        r"f: entries\[1\].tree.format: .*treeopt.tree/1",
    ),
    (
        broken(S, "entries", 1, "tree", value=to_document(search(AcceptanceTable.from_marginals([[0.5]]), 2))),
        r"f: entries\[1\].tree: has num_distances 1, the first tree has 2",
    ),
    ([1], r"f: holds no JSON object"),
]


@pytest.mark.parametrize(("document", "message"), BROKEN, ids=[message[3:40] for _, message in BROKEN])
def test_broken_documents_name_place_and_remedy(document, message: str) -> None:
    with pytest.raises(DocumentError, match="^" + message) as caught:
        from_document(document, "f")
    assert "\n" not in str(caught.value)


def test_another_kind_of_document_is_refused(tmp_path: Path) -> None:
    write_document(TABLE, tmp_path / "a.json")
    with pytest.raises(DocumentError, match=r"is 'treeopt.acceptance/1'; expected treeopt.tree/1"):
        read_document(tmp_path / "a.json", TreeDesign)


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(200 * 2**20)


FILES: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda path: None, "No such file"),
    ("folder", lambda path: path.mkdir(), "Is a directory"),
    ("empty", lambda path: path.write_text(" \n"), "is empty"),
    ("huge", huge, "is larger than 64 MB"),
    ("utf16", lambda path: path.write_bytes('{"format": 1}'.encode("utf-16")), "is not UTF-8 text"),
    ("byte order mark", lambda path: path.write_bytes(b"\xef\xbb\xbf{}"), "starts with a byte order mark"),
    ("nested", lambda path: path.write_text("[" * 20_000), "nested too deeply"),
    ("nested-closed", lambda path: path.write_text("[" * 20_000 + "]" * 20_000), "nested too deeply"),
    ("cut", lambda path: path.write_text('{"format": "treeopt'), "is not JSON: .* at line 1"),
    ("nan", lambda path: path.write_text('{"a": NaN}'), "NaN is not a finite number"),
    ("overflow", lambda path: path.write_text('{"a": 1e999}'), "1e999 is too large"),
    ("digits", lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"), "is not strict JSON"),
    ("twice", lambda path: path.write_text('{"a": 1, "a": 2}'), "the field 'a' stands twice"),
    ("text", lambda path: path.write_text("hello"), "is not JSON"),
]


@pytest.mark.parametrize(("make", "message"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_hostile_files_are_refused_in_one_line(make, message: str, tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    make(path)
    with pytest.raises(DocumentError, match=message) as caught:
        read_document(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_row_may_exceed_1_by_a_millionth_and_no_more() -> None:
    assert AcceptanceTable.from_marginals([[0.5, 0.500001]]).num_ranks == 2
    with pytest.raises(InvalidValueError, match=r"marginals\[0\]: sums to 1.0000011, above 1"):
        AcceptanceTable.from_marginals([[0.5, 0.5000011]])


def test_numbers_of_arrays_become_plain_numbers() -> None:
    table = AcceptanceTable.from_marginals(np.array([[1, 0]]))
    assert to_document(table)["marginals"] == [[1, 0]]
    assert AcceptanceTable.from_marginals(np.array([[0.5]], dtype=np.float32)).marginals == ((0.5,),)
    points = dict(zip(np.arange(1, 3), np.array([1, 2], dtype=np.float32), strict=True))
    assert LatencyProfile.from_medians(points) == LatencyProfile.from_medians({1: 1.0, 2: 2.0})


def test_a_null_byte_in_a_name_is_refused() -> None:
    with pytest.raises(DocumentError, match="cannot be read"):
        read_json("a\0b")


def test_failed_writes_leave_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DocumentError, match=r"cannot be written .No space left on device."):
        write_text("after", path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    for name in ("old.json", "new.json"):
        (tmp_path / "link.json").symlink_to(name)
        (tmp_path / "old.json").write_text("{}")
        write_document(TABLE, tmp_path / "link.json")
        assert read_document(tmp_path / name) == TABLE
        assert (tmp_path / "link.json").is_symlink()
        (tmp_path / "link.json").unlink()


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(b"content", pipe)
        assert os.read(reader, 100) == b"content"
        assert pipe.is_fifo()
    finally:
        os.close(reader)


def test_a_name_as_long_as_the_file_system_allows_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    write_document(TABLE, path)
    assert read_document(path) == TABLE


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"missing/a.json: cannot be written"):
        write_text("x", tmp_path / "missing" / "a.json")
    with pytest.raises(DocumentError, match="is a folder; name a file in it"):
        write_text("x", tmp_path)


def test_exported_profiles_carry_a_digest_that_changes_are_caught_by(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_document(PROFILE, path)
    changed = json.loads(path.read_text())
    changed["points"][0]["median_s"] = 0.2
    path.write_text(json.dumps(changed))
    with pytest.raises(DocumentError, match="sha256: does not match the content"):
        read_document(path)


def test_unsorted_nodes_are_refused() -> None:
    nodes = SparseTree.from_prompt_tokens({(): 0, (1,): 0, (0,): 0}).nodes
    assert [node.path for node in nodes] == [(), (0,), (1,)]
    with pytest.raises(ValueError, match="must be sorted by depth, then path"):
        SparseTree((nodes[0], nodes[2], nodes[1]))


def test_a_switching_table_applies_its_first_entry_that_covers_batch_and_context() -> None:
    places = {(1, 1): 0, (1, 128): 0, (1, 129): 1, (1, 1024): 1, (2, 5): 2, (4, 1024): 2}
    assert {key: SWITCH.place(*key) for key in places} == places
    # Outside what was measured the nearest range goes on.
    assert [SWITCH.place(*key) for key in ((1, 9000), (9, 10), (9, 9000))] == [1, 2, 2]
