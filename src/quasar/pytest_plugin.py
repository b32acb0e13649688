"""The pytest plug-in: ``pytest --quasar-check WHAT`` checks that strategies keep their protocols.

Nothing heavy is imported unless the option is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("quasar").addoption(
        "--quasar-check",
        action="append",
        default=[],
        metavar="WHAT",
        help="check that strategies keep their protocols: a distribution (all that it registers), or KIND=SPEC, as in "
        "drafter=ngram:k=3; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quasar_check"):
        config.args.append(str(Path(__file__).parent / "testing" / "test_conformance.py"))
