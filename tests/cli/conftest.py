"""The ``treeopt`` fixture: the command line as a function."""

import pytest

from tests.cli.command import Command


@pytest.fixture
def treeopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command and return its exit code, stdout and stderr."""
    return Command(monkeypatch, capsys)
