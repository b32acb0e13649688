"""What each package imports is what it declares."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import quasar

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parent.parent
PROJECTS = [ROOT, *sorted((ROOT / "plugins").iterdir())]
NOT_IMPORTED = {"accelerate"}
"""transformers wants it when it loads a .gguf file."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(folder: Path) -> dict[str, Requirement]:
    """Every requirement of a package, those of its extras too, by name."""
    table = project(folder)
    lines = [
        *table["dependencies"],
        *(line for extra in table.get("optional-dependencies", {}).values() for line in extra),
    ]
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(r.name): r
        for r in requirements
        if canonicalize_name(r.name) != canonicalize_name(table["name"])
    }


def imported(folder: Path) -> set[str]:
    """The distributions that a package's modules import, wherever in the module."""
    sources = list((folder / "src").rglob("*.py"))
    own = {path.relative_to(folder / "src").parts[0].removesuffix(".py") for path in sources}
    modules = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.split(".")[0])
    known = {**packages_distributions(), "quasar": ["quasar-decode"]}
    return {canonicalize_name(known.get(m, [m])[0]) for m in modules - set(sys.stdlib_module_names) - own}


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: project(folder)["name"])
def test_what_is_imported_is_declared_and_nothing_else_is(folder):
    """Nothing is there by accident, because something else happens to bring it."""
    assert imported(folder) == set(declared(folder)) - NOT_IMPORTED


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: project(folder)["name"])
def test_every_dependency_says_from_which_version_on_it_serves(folder):
    """An open lower end claims that a release of ten years ago would do."""
    for requirement in declared(folder).values():
        assert any(clause.operator in (">=", "==", "~=") for clause in requirement.specifier), str(requirement)


@pytest.mark.parametrize("folder", PROJECTS[1:], ids=lambda folder: project(folder)["name"])
def test_a_plugin_of_this_repository_fits_the_library_beside_it(folder):
    """And not the next one, whose protocols it cannot know."""
    specifier = declared(folder)["quasar-decode"].specifier
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", quasar.__version__).groups())
    assert specifier.contains(quasar.__version__)
    assert not specifier.contains(f"{major}.{minor + 1}.0")
    assert not specifier.contains("0.1.0")


def test_the_lowest_versions_that_are_tested_are_those_that_are_declared():
    """Of the core and its extras: what ``constraints-lowest.txt`` pins is the lower end of each range."""
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = {r.name: r.specifier for r in map(Requirement, (line for line in lines if not line.startswith("#")))}
    assert set(pinned) == set(declared(ROOT))
    for name, requirement in declared(ROOT).items():
        (lowest,) = (clause.version for clause in requirement.specifier if clause.operator == ">=")
        (clause,) = pinned[name]
        assert (clause.operator, Version(clause.version)) == ("==", Version(lowest)), name
