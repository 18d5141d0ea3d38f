"""Every command has help with an example, and stands in the README."""

from pathlib import Path

import pytest
import typer

from tests.cli.command import Command
from treeopt.cli import app

ROOT = Path(__file__).parent.parent.parent


def names_of(group: typer.Typer, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command's words, sub-apps included."""
    found = [
        (*before, command.name or (command.callback.__name__ if command.callback else ""))
        for command in group.registered_commands
    ]
    for sub in group.registered_groups:
        if sub.typer_instance is not None and sub.name:
            found += names_of(sub.typer_instance, (*before, sub.name))
    return found


COMMANDS = names_of(app)


def test_there_are_commands() -> None:
    assert ("search",) in COMMANDS
    assert ("profile", "run") in COMMANDS


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_of_the_command(treeopt: Command, words: tuple[str, ...]) -> None:
    done = treeopt(*words, "--help")
    assert done.code == 0
    assert f"Example: treeopt {' '.join(words)}" in " ".join(done.out.split())


@pytest.mark.parametrize("words", [words for words in COMMANDS if len(words) == 1], ids=" ".join)
def test_the_readme_shows_the_command(words: tuple[str, ...]) -> None:
    assert f"treeopt {' '.join(words)}" in (ROOT / "README.md").read_text()
