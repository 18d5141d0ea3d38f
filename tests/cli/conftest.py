"""The ``treeopt`` fixture: the command line as a function."""

from pathlib import Path

import pytest

from tests.cli.command import Command


@pytest.fixture
def treeopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command and return its exit code, stdout and stderr."""
    return Command(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's own profiles out of the tests."""
    monkeypatch.setenv("TREEOPT_DB", str(tmp_path / "none" / "treeopt.db"))
