"""Commands by the hook ``quasar_commands``: Quasar's own, and those that plug-ins bring."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from quasar.registry.registry import default_registry
from test_cli import install_plugin, run_python

HOOK = "import quasar\n@quasar.hookimpl\ndef quasar_commands():\n    return {}\n"
HELLO = """
import click
from quasar.errors import InvalidRequestError

@click.command(name="another name")
@click.option("--times", default=1)
def hello(times):
    print("hello " * times)

@click.group()
def store():
    pass

@store.command()
def build():
    print("built")

@click.command()
def fails():
    raise InvalidRequestError("times=0: give more")

def plain():
    print("called")
"""
PATHS = {name: f"acme_inside:{name}" for name in ("hello", "store", "fails", "plain")}


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs a plug-in with the commands that are given, by their import paths, and lets it load."""
    before = set(sys.modules)
    (tmp_path / "acme_inside.py").write_text(HELLO, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    default_registry.cache_clear()
    allowed = []

    def install(commands: object, name: str = "acme") -> None:
        install_plugin(tmp_path, HOOK.format(commands), name)
        allowed.append(name)
        monkeypatch.setenv("QUASAR_PLUGINS", ",".join(allowed))
        importlib.invalidate_caches()

    yield install
    default_registry.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(["hello", "--times", "2"], "hello hello \n"), (["store", "build"], "built\n")],
)
def test_a_command_of_a_plugin_runs_like_any_other(quasar_command, acme, arguments, printed):
    """With options and with commands of its own, by the name that the hook gives it."""
    acme(PATHS)
    assert quasar_command(*arguments) == (0, printed, "")
    status, out, _ = quasar_command("hello", "-h")
    assert (status, out.split("\n")[0]) == (0, "Usage: quasar hello [OPTIONS]")


def test_a_command_may_be_given_itself(quasar_command, acme):
    """As a strategy's class may, in place of its import path."""
    acme("{'hi': __import__('acme_inside').hello}")
    assert quasar_command("hi") == (0, "hello \n", "")


def test_a_command_s_errors_end_as_ours_do(quasar_command, acme):
    """One line, and the status of a user's mistake."""
    acme(PATHS)
    assert quasar_command("fails") == (2, "", "quasar: times=0: give more\n")


def test_listing_commands_imports_none(quasar_command, acme):
    """A path is enough to say that there is something."""
    acme(PATHS)
    rows = json.loads(quasar_command("plugins", "--json")[1])
    found = {row["name"]: row["origin"] for row in rows if row["kind"] == "command"}
    assert found == dict.fromkeys(("generate", "inspect", "parity", "plugins", "quantize"), "quasar-decode") | (
        dict.fromkeys(PATHS, "acme")
    )
    assert "acme_inside" not in sys.modules


def test_a_command_imports_no_other():
    """Nor the plug-ins, nor what strategies are registered with."""
    program = "import atexit, sys; from quasar.commands import cli; atexit.register(lambda: print(*sys.modules))"
    process = run_python("-c", f"{program}; cli.main()", "inspect", "--help")
    modules = set(process.stdout.decode().splitlines()[-1].split())
    assert "quasar.commands.cli.inspect" in modules
    assert not modules & {"quasar.commands.cli.generate", "quasar.registry.plugins", "quasar.registry.registry"}


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("acme_inside:plain", "is a function, expected a click.Command; click.command() makes one"),
        ("acme_inside:nothing", "acme_inside:nothing cannot be imported: AttributeError: module 'acme_inside' has no"),
        ("acme_nowhere:it", "acme_nowhere:it cannot be imported: ModuleNotFoundError: No module named 'acme_nowhere'"),
    ],
)
def test_a_command_that_cannot_be_loaded_is_one_line_and_the_others_work(quasar_command, acme, path, cause):
    """It says whose command it is; a command of Quasar does not mind, nor does another of the same plug-in."""
    acme({**PATHS, "bad": path})
    status, out, err = quasar_command("bad")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("quasar: command 'bad' of acme 1.0 [acme]")
    assert cause in err
    assert quasar_command("hello") == (0, "hello \n", "")
    assert quasar_command("plugins")[0] == 0


@pytest.mark.parametrize(("given", "shown"), [("5", "5"), ("len", "<built-in function len>"), ("'acme'", "'acme'")])
def test_what_is_no_command_is_told_where_it_is_asked_for(quasar_command, acme, given, shown):
    """And by ``quasar plugins``, with what would be right."""
    acme(f"{{'acme': {given}}}")
    told = f"plug-in acme 1.0 [acme]: command 'acme' is {shown}, expected a click.Command or 'package.module:attribute'"
    status, _, err = quasar_command("acme")
    assert status == 2
    assert err.splitlines()[-1].startswith(f"quasar: no command named 'acme': {told}")
    assert f"broken: {told}" in quasar_command("plugins")[1]


def test_a_name_that_is_taken_stays_with_whoever_was_first(quasar_command, acme):
    """A built-in command before those of plug-ins, these by the names of their packages; what is ignored is listed."""
    acme({"hello": "acme_inside:plain", "plugins": "acme_inside:hello"}, "acmetwo")
    acme({"hello": "acme_inside:hello"}, "acmeone")
    assert quasar_command("hello")[:2] == (0, "hello \n")
    out = quasar_command("plugins")[1]
    assert "shadowed: command 'hello' of acmetwo 1.0 [acmetwo] is ignored: acmeone 1.0 [acmeone] provides" in out
    assert "shadowed: command 'plugins' of acmetwo 1.0 [acmetwo] is ignored: quasar-decode " in out


def test_the_environment_limits_commands_too(quasar_command, acme, monkeypatch):
    acme(PATHS)
    monkeypatch.setenv("QUASAR_PLUGINS", "")
    status, out, err = quasar_command("hello")
    assert (status, out) == (2, "")
    assert err == "quasar: no command named 'hello'. Installed: generate, inspect, parity, plugins, quantize.\n"
