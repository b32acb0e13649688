"""The command line, one command a file. torch is imported when a model is needed, not before."""

from __future__ import annotations

import click

from quasar import __version__
from quasar.commands.cli import exits
from quasar.commands.cli.generate import generate
from quasar.commands.cli.inspect import inspect
from quasar.commands.cli.parity import parity
from quasar.commands.cli.plugins import plugins
from quasar.commands.cli.quantize import quantize


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(__version__, prog_name="quasar")
@click.pass_context
def cli(context: click.Context) -> None:
    """Decode a causal language model faster, with output that is exactly what it is said to be."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (generate, parity, inspect, quantize, plugins):
    cli.add_command(command)


def main() -> None:
    """Run the command line; see :func:`quasar.commands.cli.exits.run`."""
    exits.run(cli)
