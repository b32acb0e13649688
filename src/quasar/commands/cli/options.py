"""The options that several commands have, each written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


def stacked(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Several decorators as one; their options are shown in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def quantizer(default: str) -> Decorator[Any]:
    """``--quantizer``; ``default`` is ``auto`` or what a command is about."""
    chosen = " auto: w8a8, or none for a model that comes quantized." if default == "auto" else ""
    meaning = f"How to quantize the model, as name:option=value,…; none: not at all.{chosen}"
    return click.option("--quantizer", default=default, show_default=True, help=meaning)


def as_json(what: str = "one JSON object") -> Decorator[Any]:
    """``--json``, as the argument ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what}.")


model = click.option(
    "-m", "--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2."
)
verifier = click.option(
    "--verifier",
    default="auto",
    show_default=True,
    help="What runs the model; auto: native where it is installed, on a CPU, else causal_lm.",
)
calibration = click.option(
    "--calibration", type=click.Path(), default=None, help="File of prompts to quantize with: .txt or .jsonl."
)
placement = stacked(
    click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]"),
    click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]"),
)
