"""The command line: what it accepts, and what it runs. torch is imported when a model is needed, not before."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quasar import __version__
from quasar.commands import console
from quasar.commands.plots import require_matplotlib
from quasar.errors import InvalidRequestError, QuasarError

if TYPE_CHECKING:
    from quasar.commands.parity import AgreementReport
    from quasar.loop.processing import Processor
    from quasar.pipeline.pipeline import Pipeline
    from quasar.types import GenerationResult
    from quasar.verifiers.invariance import InvarianceReport


def main() -> None:
    """Run the command line. Exit status: 0 fine, 2 a user's mistake (one line), 1 our fault (traceback)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that cannot show a character must not end the program
    try:
        # Not cli.main(): click would answer a closed pipe with status 1, and expand a "*" in a prompt on Windows.
        with cli.make_context("quasar", sys.argv[1:]) as context:
            cli.invoke(context)
        sys.stdout.flush()
        status = 0
    except click.exceptions.Exit as end:  # after --help or --version
        status = end.exit_code
    except BrokenPipeError:
        _silence_broken_pipes()  # whoever read our output has seen enough
        status = 0
    except (QuasarError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"quasar: {' '.join(message.split())}", file=sys.stderr)
        status = 2
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except Exception:
        traceback.print_exc()
        status = 1
    sys.exit(status)


def _silence_broken_pipes() -> None:
    """Let Python not fail again when it flushes at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, invoke_without_command=True
)
@click.version_option(__version__, prog_name="quasar")
@click.pass_context
def cli(context: click.Context) -> None:
    """Decode a causal language model faster, with output that is exactly what it is said to be."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


_QUANTIZER = "What makes the target; none: the full model; auto: w8a8, or none where the model comes quantized."
_VERIFIER = "What runs the target; auto: native where it is installed, on a CPU, else causal_lm."


@cli.command()
@click.argument("prompt")
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--drafter", default="ngram", show_default=True, help="What proposes tokens, as name:option=value,…")
@click.option("--quantizer", default="auto", show_default=True, help=_QUANTIZER)
@click.option("--policy", default="auto", show_default=True, help="What accepts tokens.")
@click.option("--verifier", default="auto", show_default=True, help=_VERIFIER)
@click.option("--exact-to", type=click.Choice(["quantized", "full"]), default="quantized", show_default=True)
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-k", type=int, default=None)
@click.option("--top-p", type=float, default=None)
@click.option("--min-p", type=float, default=None)
@click.option("--repetition-penalty", type=float, default=None)
@click.option("--no-repeat-ngram-size", type=int, default=None)
@click.option("--min-new-tokens", type=int, default=None)
@click.option("--logprobs", type=int, default=None, help="Report this many log-probabilities a token (with --json).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stop", multiple=True, help="End before this string; may be given several times.")
@click.option("--json-schema", type=click.Path(), default=None, help="File of a JSON schema that the output must fit.")
@click.option("--regex", default=None, help="Regular expression that the whole output must match.")
@click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]")
@click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]")
@click.option("--calibration", type=click.Path(), default=None, help="Prompts for the quantizer: .txt or .jsonl.")
@click.option("--strict", is_flag=True, help="Bit-identical logits at any width, or fail; slower.")
@click.option("--no-speculation", is_flag=True, help="Decode with the target alone, one token a step.")
@click.option("--compare", is_flag=True, help="Decode once more without speculation and compare the tokens.")
@click.option("--raw", is_flag=True, help="Do not apply the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def generate(prompt: str, model: str, no_speculation: bool, compare: bool, as_json: bool, **options: Any) -> None:
    """Answer PROMPT ("-": read it from standard input)."""
    if compare and no_speculation:
        raise click.UsageError("--compare compares with decoding without speculation; leave out --no-speculation")
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs is reported in JSON only; add --json")
    console.prepare_terminal()
    from quasar.pipeline.pipeline import Pipeline
    from quasar.pipeline.request import Request
    from quasar.progress import tracked_by

    if prompt == "-":
        prompt = _read_prompt()
    settings = {name: options.pop(name) for name in _SETTINGS}
    asked = {**settings, "json_schema": options.pop("json_schema"), "regex": options.pop("regex")}
    Request.of(settings)  # refuse before the model is loaded
    constraint = _constraint(asked["json_schema"], asked["regex"])
    with tracked_by(console.progress_bar):
        pipeline = Pipeline.from_pretrained(model, **options)
    if constraint is not None:
        settings["logits_processors"] = [constraint(pipeline.tokenizer)]
    result = _answer(pipeline, prompt, settings, speculate=not no_speculation, echo=not as_json)
    reference = pipeline.reference(prompt, **settings) if compare else None
    if as_json:
        print(json.dumps(console.result_as_json(result, reference, {**pipeline.description, **asked})))
    else:
        console.print_summary(result, reference)


_SETTINGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "logprobs", "seed", "stop", "raw"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)


def _constraint(schema_file: str | None, pattern: str | None) -> Callable[[Any], Processor] | None:
    """What makes the processor, once there is a tokenizer; refuses before that what it can."""
    if schema_file is not None and pattern is not None:
        raise click.UsageError("--json-schema and --regex exclude each other; give one of them")
    if schema_file is None and pattern is None:
        return None
    from quasar.pipeline import constraints

    if pattern is not None:
        constraints.check_regex(pattern)
        return partial(constraints.regex, pattern)
    try:
        schema = Path(str(schema_file)).read_text(encoding="utf-8")
        constraints.check_json_schema(schema)
    except (OSError, ValueError) as error:
        raise QuasarError(f"--json-schema {schema_file}: {error}") from error
    return partial(constraints.json_schema, schema)


def _answer(
    pipeline: Pipeline, prompt: str, settings: dict[str, Any], *, speculate: bool, echo: bool
) -> GenerationResult:
    """Decode, and print the text to standard output as it is made if ``echo``."""
    if not speculate:
        result = pipeline.reference(prompt, **settings)
        if echo:
            print(result.text)
        return result
    stream = pipeline.stream(prompt, **settings)
    for chunk in stream:
        if echo:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    if echo:
        print()
    return stream.result


def _read_prompt() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise QuasarError(
            f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}"
        ) from error


@cli.command()
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--quantizer", default="w8a8", show_default=True, help="What makes the target; none: the full model.")
@click.option("--verifier", default="auto", show_default=True, help=_VERIFIER)
@click.option("--strict", is_flag=True, help="Measure the strict verifier.")
@click.option("--tokens", type=click.IntRange(min=16), default=64, show_default=True, help="Compared for each prompt.")
@click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]")
@click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", "page", type=click.Path(path_type=Path), default=None, help="Also write a page with plots.")
def parity(model: str, as_json: bool, page: Path | None, **choices: Any) -> None:
    """Measure whether logits depend on the width of a forward, and how far the target is from the full model.

    Exits with 1 if they depend on it more than the verifier declares.
    """
    console.prepare_terminal()
    if page is not None:
        _check_page(page)
    from quasar.commands.parity import as_json as as_object
    from quasar.commands.parity_model import measure_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        invariance, agreement = measure_model(model, **choices)
    if as_json:
        print(json.dumps(as_object(invariance, agreement)))
    else:
        console.print_parity(invariance, agreement)
    if page is not None:
        _write_page(page, invariance, agreement, {"model": model, **choices})
    if not invariance.holds:
        raise SystemExit(1)


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


@cli.command()
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--quantizer", default="auto", show_default=True, help=_QUANTIZER)
@click.option("--calibration", type=click.Path(), default=None, help="Prompts for the quantizer: .txt or .jsonl.")
@click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]")
@click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]")
@click.option("--sensitivity", is_flag=True, help="Measure what each layer's rounding costs; slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model: str, as_json: bool, **choices: Any) -> None:
    """Say what a quantizer makes of a model: each layer with bits, bytes, kernel and error, and what is left alone."""
    console.prepare_terminal()
    from quasar.commands.inspect import inspect_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        report = inspect_model(model, **choices)
    if as_json:
        print(json.dumps(report))
    else:
        console.print_inspection(report)


@cli.command()
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--quantizer", default="w8a8", show_default=True, help="As name:option=value,…")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder for the quantized model.")
@click.option("--calibration", type=click.Path(), default=None, help="Prompts for the quantizer: .txt or .jsonl.")
@click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]")
@click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def quantize(model: str, out: Path, as_json: bool, **choices: Any) -> None:
    """Quantize a model and save it in a folder, which any --model takes."""
    console.prepare_terminal()
    from quasar.commands.quantize import quantize_model
    from quasar.progress import tracked_by

    with tracked_by(console.progress_bar):
        report = quantize_model(model, out, **choices)
    if as_json:
        print(json.dumps({"out": str(out), **report}))
    else:
        console.print_saved(report, out)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--strict", is_flag=True, help="Exit with 2 if a plug-in is broken or a name is taken twice.")
def plugins(as_json: bool, strict: bool) -> None:
    """List the installed strategies, and the plug-ins that could not be loaded."""
    from quasar.registry.plugins import load_plugins
    from quasar.registry.registry import Registry

    registry = Registry(load_plugins())
    rows = console.plugin_rows(registry)
    if as_json:
        print(json.dumps(rows))
    else:
        console.print_plugins(rows)
    if strict and (problems := registry.problems()):
        raise QuasarError(f"{len(problems)} problem(s): {'; '.join(problems)}")
