"""Imports run one way: each room of the library stands on those below it, and knows nothing of those above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quasar

SOURCE = Path(quasar.__file__).parent
FLOORS = (
    {"errors", "later", "options", "progress", "types", "protocols", "timings"},
    {"weights"},
    {"registry"},
    {"loop"},
    {"kernels"},
    {"policies"},
    {"verifiers"},
    {"quantizers"},
    {"checkpoints"},
    {"drafters"},
    {"pipeline"},
    {"commands", "testing"},
    {"__main__", "pytest_plugin"},
)
"""From the ground up; docs/structure.md says what each room is for."""

HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ONLY_IN = {
    "click": "commands/cli",
    "rich": "commands/console.py",
    "matplotlib": "commands/plots.py",
    "hypothesis": "testing",
    "llguidance": "pipeline/constraints.py",
    "hqq": "quantizers/hqq.py",
}
"""Packages that one place imports, and no other."""


def imports_of(tree: ast.AST, *, at_run_time: bool = True) -> Iterator[str]:
    """Full names of modules, function bodies included; without those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            if node.module.count(".") == 0:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports_of(node, at_run_time=at_run_time)


def room_of(module: str) -> str | None:
    """The room of a module of the library; ``None`` for the names of the package itself."""
    room = module.split(".")[1] if "." in module else ""
    return room if room in HEIGHT else None


def against_the_direction(path: str, source: str) -> list[str]:
    """What a file imports from a room above its own, or from another on its own floor."""
    own = path.split("/")[0].removesuffix(".py")
    names = [name for name in imports_of(ast.parse(source)) if name.split(".")[0] == "quasar"]
    rooms = {name: room_of(name) for name in names}
    above = [name for name, room in rooms.items() if room and room != own and HEIGHT[room] >= HEIGHT[own]]
    return [name for name in above if HEIGHT[own] > 0 or HEIGHT[str(rooms[name])] > 0]


def files() -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def test_every_file_stands_in_a_room():
    rooms = {path.split("/")[0].removesuffix(".py") for path in files()}
    assert rooms - {"__init__"} == set(HEIGHT)


@pytest.mark.parametrize("path", [path for path in files() if path != "__init__.py"])
def test_a_file_imports_nothing_from_above(path: str):
    assert against_the_direction(path, (SOURCE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", files())
def test_a_package_that_one_place_uses_is_imported_by_no_other(path: str):
    imported = {name.split(".")[0] for name in imports_of(ast.parse((SOURCE / path).read_text(encoding="utf-8")))}
    assert [name for name in imported & ONLY_IN.keys() if not path.startswith(ONLY_IN[name])] == []


def test_the_core_names_no_plug_in():
    """What is outside comes in through hooks: no module of the library imports a package that registers with it."""
    imported = {name for path in files() for name in imports_of(ast.parse((SOURCE / path).read_text(encoding="utf-8")))}
    assert {name for name in imported if name.startswith("quasar_")} == set()


def test_an_import_against_the_direction_is_found():
    """Also inside a function, and where only the package is named."""
    planted = "def f():\n    from quasar.pipeline.plan import Plan\n"
    assert against_the_direction("kernels/dense.py", planted) == ["quasar.pipeline.plan"]
    assert against_the_direction("weights/record.py", "from quasar import commands\n") == ["quasar.commands"]
    assert against_the_direction("commands/cli/inspect.py", "import quasar.testing.fakes\n") == ["quasar.testing.fakes"]
    assert against_the_direction("commands/cli/inspect.py", planted) == []
