"""The command line, one command a file. torch is imported when a model is needed, and not before."""

from __future__ import annotations

import click

from quasar import __version__
from quasar.commands.cli import exits
from quasar.commands.cli.group import Commands


@click.group(
    cls=Commands,
    epilog="Plug-ins may bring further commands: 'quasar plugins' lists them.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="quasar")
@click.pass_context
def cli(context: click.Context) -> None:
    """Generate text with a language model, faster.

    A cheap drafter proposes tokens, and the model, usually a quantized copy of it, verifies several of them in one
    step. The output is exactly what the verifying model would have generated alone.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the command line; see :func:`quasar.commands.cli.exits.run`."""
    exits.run(cli)
