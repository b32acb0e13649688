"""``quasar parity``: how far is a target from the full model, and from itself at another width?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quasar.commands import console
from quasar.commands.cli import early, options
from quasar.commands.plots import require_matplotlib
from quasar.errors import InvalidRequestError, QuasarError

if TYPE_CHECKING:
    from quasar.commands.parity import AgreementReport
    from quasar.verifiers.invariance import InvarianceReport


@click.command()
@options.model
@options.quantizer("w8a8")
@options.verifier
@click.option("--strict", is_flag=True, help="Measure the strict verifier.")
@click.option("--tokens", type=click.IntRange(min=16), default=64, show_default=True, help="Tokens for each prompt.")
@click.option(
    "--widths",
    default="1-16",
    show_default=True,
    help="Numbers of positions that a forward computes, such as 1-16,24,32.",
)
@options.placement
@options.as_json()
@click.option("--html", "page", type=click.Path(path_type=Path), default=None, help="File for a page with plots.")
def parity(model: str, widths: str, as_json: bool, page: Path | None, **choices: Any) -> None:
    """Measure how exact verification and the quantized model are.

    Reports whether logits depend on the width of a forward, which is how many positions it computes, and how far they
    are from those of the full model. Exits with 1 if they depend on the width more than the verifier declares.
    """
    console.prepare_terminal()
    early.check_names(choices)
    measured_at = _numbers(widths, at_most=choices["tokens"])
    if page is not None:
        _check_page(page)
    from quasar.commands.parity import as_json as as_object
    from quasar.commands.parity_model import measure_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        invariance, agreement = measure_model(model, widths=measured_at, **choices)
    if as_json:
        print(json.dumps(as_object(invariance, agreement)))
    else:
        console.print_parity(invariance, agreement)
    if page is not None:
        _write_page(page, invariance, agreement, {"model": model, "widths": widths, **choices})
    if not invariance.holds:
        raise click.exceptions.Exit(1)


def _numbers(widths: str, *, at_most: int) -> list[int]:
    """The numbers in ``1-16,32``, in order, each once."""
    parts = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part) for part in widths.split(",")]
    spans = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    if len(spans) < len(parts) or any(not 1 <= first <= last for first, last in spans):
        raise click.UsageError(f"--widths {widths}: give numbers of at least 1 and ranges of them, such as 1-16,24,32")
    if (widest := max(last for _, last in spans)) > at_most:
        raise click.UsageError(f"--widths {widths}: {widest} positions a forward need --tokens {widest} at least")
    return sorted({width for first, last in spans for width in range(first, last + 1)})


def _check_page(page: Path) -> None:
    """Refuse before measuring what would fail after it. An old page stays as it is, and no new file is left."""
    require_matplotlib()
    is_new = not os.path.lexists(page)
    try:
        page.open("ab").close()
        if is_new:
            page.unlink()
    except OSError as error:
        raise InvalidRequestError(f"--html: {page} cannot be written: {error.strerror}") from error


def _write_page(
    page: Path, invariance: InvarianceReport, agreement: AgreementReport, choices: Mapping[str, Any]
) -> None:
    from quasar.commands.parity_html import conditions, parity_html

    text = parity_html(invariance, agreement, conditions(choices))
    try:
        page.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise QuasarError(f"--html: {page} cannot be written: {error.strerror}") from error
