"""Switching tables and advice from the profiles stored on this device."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from db.profiles import finish_profile, open_profile, record_point
from db.schema import open_database
from profiler.device import identify
from profiler.environment import environment
from tests.db.examples import conditions, point
from treeopt import AcceptanceTable, write_document
from treeopt.app.advise import load_advice_inputs
from treeopt.app.switch import search_switch
from treeopt.cli import main
from treeopt.errors import ProfileError

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'x.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    opened = open_database(url, create=True)
    assert opened is not None
    yield opened
    opened.dispose()


@pytest.fixture
def table(tmp_path: Path) -> str:
    write_document(AcceptanceTable.from_marginals([[0.5]], model="toy"), tmp_path / "table.json")
    return str(tmp_path / "table.json")


def store(engine: Engine, ratio: float, hours: float = 0, *, flags: tuple[str, ...] = (), **changes: object) -> None:
    """Store a profile of 1 and 4 tokens, the latter ``ratio`` times as slow."""
    here = {"device": identify().to_document(), "versions": environment("cpu")}
    at = NOW + timedelta(hours=hours)
    started = open_profile(engine, conditions(**{**here, **changes}), [1, 4], at)
    for n, median_s in ((1, 0.25), (4, 0.25 * ratio)):
        record_point(engine, started.id, point(n, median_s), at)
    finish_profile(engine, started.id, flags, at)


def test_a_switching_table_from_stored_profiles(engine: Engine, url: str, table: str) -> None:
    # The tree of 4 tokens brings 1.5 tokens per step: worth it where they cost no more than half again.
    for batch_size, context_len, ratio in ((1, 64, 1.0), (1, 512, 1.2), (2, 64, 1.4), (2, 512, 2.0)):
        store(engine, ratio, batch_size=batch_size, context_len=context_len)
    found = search_switch(table, ["auto"], 4, [1, 2], [64, 512], db_url=url)
    speedups = {(cell.batch_size, cell.context_len): cell.design.speedup for cell in found.plan.cells}
    assert speedups == pytest.approx({(1, 64): 1.5, (1, 512): 1.25, (2, 64): 1.5 / 1.4, (2, 512): 1.0})
    entries = [(entry.batch_max, entry.context_max, entry.tree.speedup) for entry in found.plan.table.entries]
    assert entries == [(1, 512, pytest.approx(1.25)), (2, 64, pytest.approx(1.5 / 1.4)), (2, 512, 1.0)]
    # The nearest profile is not good enough here: a range ends at what was measured.
    with pytest.raises(ProfileError, match=r"no latency profile of batch 1, context 600; run: treeopt profile run"):
        search_switch(table, ["auto"], 4, [1], [64, 600], db_url=url)


def test_advice_breaks_even_over_profiles_that_differ_in_batch_and_context_only(
    engine: Engine, url: str, table: str
) -> None:
    store(engine, 1.0, batch_size=1, context_len=512)
    store(engine, 1.9, batch_size=2, context_len=512)
    store(engine, 1.2, hours=1, batch_size=2, context_len=512)  # newer
    store(engine, 1.3, batch_size=1, context_len=64)
    store(engine, 3.0, batch_size=8, context_len=64, flags=("noisy",))
    store(engine, 3.0, batch_size=4, context_len=64, dtype="bfloat16")
    store(engine, 3.0, batch_size=16, context_len=64, model="another")
    _, (first, *others), record, line = load_advice_inputs(table, ["auto"], None, url)
    assert (first.batch_size, first.context_len) == (1, 512)
    ratios = {(each.batch_size, each.context_len): each.median_s(4) / each.median_s(1) for each in others}
    assert ratios == pytest.approx({(2, 512): 1.2, (1, 64): 1.3})
    assert record is None
    assert line is not None
    assert "of this device: toy" in line


def test_search_for_another_engine_uses_the_profile_of_the_batch_and_context_asked_for(
    engine: Engine, url: str, table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(engine, 1.1, batch_size=1, context_len=512)
    store(engine, 3.0, batch_size=4, context_len=64)
    for more, answer in (((), "[[0]]\n"), (("--batch", "4", "--context", "64"), "")):
        arguments = ("search", "--acceptance", table, "--budget", "4", "--target", "medusa", "--db", url, *more)
        monkeypatch.setattr(sys, "argv", ["treeopt", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out == answer
