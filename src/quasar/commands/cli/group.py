"""The commands by name, Quasar's own and those of plug-ins; each is imported when it is used and not before."""

from __future__ import annotations

import click

from quasar.errors import PluginError
from quasar.registry.builtins import quasar_commands
from quasar.registry.hookspecs import Factory
from quasar.registry.importing import resolve


class Commands(click.Group):
    """Help, and a command of Quasar's own, wait for no plug-in; any other name asks them all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(quasar_commands())

    def get_command(self, context: click.Context, name: str) -> click.Command:
        own = quasar_commands()
        if name in own:
            return _command(own[name], f"command {name!r}")
        from quasar.registry.registry import default_registry

        entry = default_registry().entry("command", name)
        return _command(entry.factory, str(entry))


def _command(factory: Factory, who: str) -> click.Command:
    found = resolve(factory, who)
    if not isinstance(found, click.Command):
        raise PluginError(f"{who} is a {type(found).__name__}, expected a click.Command; click.command() makes one")
    return found
