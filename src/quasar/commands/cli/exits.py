"""How the program ends: with which exit status, and with what on standard error."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import click

from quasar.errors import QuasarError


def run(command: click.Command) -> NoReturn:
    """Run a command line. Exit status: 0 fine, 2 a user's mistake (one line), 130 interrupted, 1 our fault."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that cannot show a character must not end the program
    sys.exit(_status_of(command))


def _status_of(command: click.Command) -> int:
    try:
        # Not command.main(): click would answer a closed pipe with status 1, and expand a "*" in a prompt on Windows.
        with command.make_context("quasar", sys.argv[1:]) as context:
            command.invoke(context)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except click.exceptions.Exit as end:  # after --help or --version
        return end.exit_code
    except BrokenPipeError:
        _silence_broken_pipes()  # whoever read our output has seen enough
    except (QuasarError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"quasar: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the prompt of the shell begins a line of its own
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _silence_broken_pipes() -> None:
    """Keep Python from failing again when it flushes at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
