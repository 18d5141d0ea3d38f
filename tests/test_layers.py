"""Imports point one way, and each package is as light as it promises."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYWHERE = {"treeopt.types", "treeopt.errors", "treeopt.artifact", "treeopt._version"}
PACKAGES = ("treeopt", "profiler", "ppd_runtime", "db")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def room_of(module: str) -> str:
    """The layer a module belongs to."""
    for room in ("treeopt.app", "treeopt.cli", "treeopt.__main__", "profiler", "ppd_runtime", "db"):
        if module == room or module.startswith(room + "."):
            return room
    return "treeopt"


ALLOWED = {
    "treeopt": {"treeopt"},
    "profiler": {"profiler"},
    "ppd_runtime": {"ppd_runtime"},
    "db": {"db"},
    "treeopt.app": {"treeopt", "treeopt.app", "profiler", "ppd_runtime", "db"},
    "treeopt.cli": {"treeopt", "treeopt.app", "treeopt.cli"},
    "treeopt.__main__": {"treeopt.cli"},
}


def imports_of(path: Path) -> set[str]:
    """Every module of this project that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    room = room_of(module)
    for name in imports_of(path):
        # `from treeopt.types import X` is seen as treeopt.types and treeopt.types.X: either may be the module.
        if name in EVERYWHERE or name.rpartition(".")[0] in EVERYWHERE or name == "treeopt":
            continue
        assert room_of(name) in ALLOWED[room], f"{module} may not import {name}"


def loaded_after(statement: str, *suspects: str) -> list[str]:
    """Which of the suspect modules a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint([name for name in {suspects!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_searching_loads_neither_torch_nor_sql_nor_plots() -> None:
    command = "import runpy, sys; sys.argv = ['treeopt', 'search', '--budget', '8', '--json']\ntry:\n"
    command += (
        "    runpy.run_module('treeopt', run_name='__main__')\nexcept SystemExit as end:\n    assert not end.code"
    )
    heavy = ("torch", "transformers", "sqlalchemy", "matplotlib", "networkx", "scipy")
    assert loaded_after(command, *heavy) == []


@pytest.mark.parametrize("package", ["profiler", "db"])
def test_profiler_and_db_import_without_torch(package: str) -> None:
    assert loaded_after(f"import {package}", "torch", "transformers") == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_exist_and_are_listed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    listed: list[str] = []
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            listed = ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            # A command of a sub-app is reached through the app.
            defined.update(() if any(text.startswith("app.command") for text in decorators) else {node.name})
    if "migrations" in path.parts:
        pytest.skip("migrations are scripts that alembic runs, nobody imports them")
    assert not defined - set(listed), f"public but not in __all__: {sorted(defined - set(listed))}"
    assert len(listed) == len(set(listed))
