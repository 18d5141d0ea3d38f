"""Without the extras, commands that need them say so in one line, and searching works."""

import subprocess
import sys

import pytest


def run_without(*packages: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command line in an interpreter that cannot import these packages."""
    code = f"import sys\nfor name in {packages!r}: sys.modules[name] = None\n"
    code += f"sys.argv = ['treeopt', *{arguments!r}]\nfrom treeopt.cli import main\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["generate", "--model", "demo", "Hello"], "torch", "runtime"),
        (["profile", "list"], "sqlalchemy", "profile"),
        (["db", "current"], "sqlalchemy", "profile"),
    ],
    ids=["generate", "profile", "db"],
)
def test_a_missing_extra_is_named_in_one_line(arguments: list[str], package: str, extra: str) -> None:
    done = run_without("torch", "transformers", "sqlalchemy", "alembic", arguments=arguments)
    assert (done.returncode, done.stdout) == (1, "")
    line = f"treeopt: this command needs {package}, which is not installed; run: pip install 'treeopt[{extra}]'\n"
    assert done.stderr == line


def test_searching_needs_none_of_them() -> None:
    done = run_without("torch", "transformers", "sqlalchemy", "alembic", arguments=["search", "--budget", "8"])
    assert done.returncode == 0
    assert "no design beats" in done.stdout
