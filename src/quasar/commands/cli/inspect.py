"""``quasar inspect``: what does a quantizer make of a model?"""

from __future__ import annotations

import json
from typing import Any

import click

from quasar.commands import console
from quasar.commands.cli import early, options


@click.command()
@options.model
@options.quantizer("auto")
@options.calibration
@options.placement
@click.option("--sensitivity", is_flag=True, help="Measure what each layer's rounding costs; slower.")
@options.as_json()
def inspect(model: str, as_json: bool, **choices: Any) -> None:
    """Show what quantizing does to a model.

    Lists each layer with its bits, bytes, kernel and error, and what is left as it is and why.
    """
    console.prepare_terminal()
    early.check_names(choices)
    from quasar.commands.inspect import inspect_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        report = inspect_model(model, **choices)
    if as_json:
        print(json.dumps(report))
    else:
        console.print_inspection(report)
