"""Fixtures for all tests, those of the plug-ins too. No test sees third-party plug-ins unless it asks for them."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("QUASAR_PLUGINS", "")

import pytest
import torch

from quasar.commands import cli
from quasar.testing.running import load_profile

load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Most tests are many tiny operations, which a second thread only delays; and several processes run tests at once.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Divide the tests among processes (``-n 2 --dist loadgroup``): those of a function stay together.

    Those of the real model are two groups, each in one process, which loads the model once. Quasar's own come first,
    for they take longest; the plug-ins' stay in their place, for two at a time wait for each other's memory.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    first = "real model of tests"
    for item in items:
        real = item.get_closest_marker("real_model") is not None
        folder, function = item.nodeid.split("/")[0], item.nodeid.split("[")[0]
        item.add_marker(pytest.mark.xdist_group(f"real model of {folder}" if real else function))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args != (first,))


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 with its tokenizer; loaded once. Treat it as read-only."""
    from quasar.checkpoints.models import load_model

    return load_model("smollm2")


@pytest.fixture
def two_threads():
    """For tests of what PyTorch does on more than one thread; all others have one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


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
