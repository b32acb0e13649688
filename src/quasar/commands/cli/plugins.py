"""``quasar plugins``: what is installed, and what is broken."""

from __future__ import annotations

import json

import click

from quasar.commands import console
from quasar.commands.cli import options
from quasar.errors import QuasarError


@click.command()
@options.as_json("a JSON list")
@click.option("--strict", is_flag=True, help="Exit with 2 if a plug-in has a fault or a name is taken twice.")
def plugins(as_json: bool, strict: bool) -> None:
    """List installed strategies and commands, and faults of plug-ins."""
    from quasar.registry.plugins import load_plugins
    from quasar.registry.registry import Registry

    registry = Registry(load_plugins())
    rows = console.plugin_rows(registry)
    if as_json:
        print(json.dumps(rows))
    else:
        console.print_plugins(rows)
    if strict and (problems := registry.problems()):
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise QuasarError(f"{count}: {'; '.join(problems)}")
