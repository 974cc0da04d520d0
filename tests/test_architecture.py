"""Who may import whom: the table of floors in the package's docstring is the rule."""

import ast
import re
from pathlib import Path

import pytest

import trajstore

PACKAGE = Path(trajstore.__file__).parent
FLOORS = {
    name: int(floor)
    for floor, names in re.findall(r"^\| (\d+) \| (.+?) \|", trajstore.__doc__ or "", re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports, but for what runs as a script."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
    nodes = [node for top in body for node in ast.walk(top)]
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("trajstore.")}


def test_every_module_has_a_floor() -> None:
    assert set(MODULES) == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_up(module: str) -> None:
    below = {name for name in imported(module) if FLOORS[name] >= FLOORS[module]}
    assert not below, f"{module} (floor {FLOORS[module]}) imports {below}"


def test_only_the_commands_print() -> None:
    for module in set(MODULES) - {"cli"}:
        calls = [n for n in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], module
