"""``quasar quantize``: quantize once, load ever after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quasar.commands import console
from quasar.commands.cli import early, options


@click.command()
@options.model
@options.quantizer("w8a8")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the quantized model.")
@options.calibration
@options.placement
@options.as_json()
def quantize(model: str, out: Path, as_json: bool, **choices: Any) -> None:
    """Quantize a model and save it in a folder.

    Every --model takes that folder, and then nothing needs to be quantized again.
    """
    console.prepare_terminal()
    early.check_names(choices)
    from quasar.commands.quantize import quantize_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        report = quantize_model(model, out, **choices)
    if as_json:
        print(json.dumps({"out": str(out), **report}))
    else:
        console.print_saved(report, out)
