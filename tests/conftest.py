"""Fixtures for all tests. No test sees third-party plug-ins unless it asks for them."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ["QUASAR_PLUGINS"] = ""

import pytest
import torch
from hypothesis import HealthCheck, settings

from quasar.commands import cli

# A busy machine is no fault of the code: nothing here may depend on how long an example takes.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", UNHURRIED, derandomize=True, max_examples=60)
settings.register_profile("ci", UNHURRIED, derandomize=True, max_examples=200)
settings.register_profile("deep", UNHURRIED, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 with its tokenizer; loaded once. Treat it as read-only."""
    from quasar.checkpoints.models import load_model

    return load_model("smollm2")


@pytest.fixture(scope="module")
def one_thread():
    """For tests of many tiny operations, which a second thread only delays: tenfold, where other programs run."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.fixture
def quasar_command(monkeypatch, capsys):
    """Run the command line in this process; returns exit status, standard output and standard error."""

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["quasar", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code, out, err

    return run
