"""Run the command line in this process, as a user's shell would see it."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from treeopt.cli import main


@dataclass(frozen=True)
class Result:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    def json_lines(self) -> list[Any]:
        """The JSON documents on stdout, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """Callable: ``treeopt("search", "--budget", 8)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["treeopt", *map(str, arguments)])
        self.capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self.capsys.readouterr()
        return Result(code, captured.out, captured.err)
