"""The test that ``pytest --quasar-check`` adds: one for each strategy of what the option names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from quasar.errors import UnsupportedModelError
from quasar.registry.plugins import KINDS, normalized
from quasar.registry.registry import default_registry
from quasar.testing import check_drafter, check_policy, check_quantizer, check_verifier

CHECKS: dict[str, Callable[[str], None]] = {
    "drafter": check_drafter,
    "verifier": check_verifier,
    "quantizer": check_quantizer,
    "policy": check_policy,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = metafunc.config.getoption("quasar_check")
    subjects = list(dict.fromkeys(subject for what in wanted for subject in subjects_of(what)))
    metafunc.parametrize(("kind", "spec"), subjects, ids=[f"{kind}={spec}" for kind, spec in subjects])


def subjects_of(what: str) -> Iterator[tuple[str, str]]:
    """Kind and spec string of each strategy that an option names."""
    kind, equals, spec = what.partition("=")
    if equals and kind in KINDS:
        if kind not in CHECKS:
            raise pytest.UsageError(f"--quasar-check {what}: there is no check of a {kind}; {', '.join(CHECKS)} have")
        yield kind, spec
        return
    entries = default_registry().entries()
    own = [entry for entry in entries if entry.origin.distribution == normalized(what)]
    if not own:
        installed = ", ".join(sorted({entry.origin.distribution for entry in entries}))
        raise pytest.UsageError(
            f"--quasar-check {what}: no distribution of that name registers a strategy ({installed} do), and it is no "
            f"KIND=SPEC with KIND one of {', '.join(CHECKS)}"
        )
    yield from ((entry.kind, entry.name) for entry in own if entry.kind in CHECKS)


def test_conforms(kind: str, spec: str) -> None:
    """It keeps its protocol."""
    if missing := required_options(kind, spec):
        pytest.skip(f"{kind} {spec} needs options: --quasar-check {kind}={spec}:{missing[0]}=…")
    try:
        CHECKS[kind](spec)
    except UnsupportedModelError as error:  # none of the check's own models is of its kind
        pytest.skip(f"{kind} {spec} needs models of yours, checked by its function in quasar.testing: {error}")


def required_options(kind: str, spec: str) -> list[str]:
    """Options without a default, of a spec string that gives none."""
    if ":" in spec:
        return []
    return default_registry().required_options(kind, spec)
