"""The command line: parsing and printing only. torch is imported when a model is needed, not before."""

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
from quasar.errors import QuasarError

if TYPE_CHECKING:
    from quasar.parity import AgreementReport, InvarianceReport
    from quasar.pipeline import Pipeline
    from quasar.processing import Processor
    from quasar.types import GenerationResult


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


@cli.command()
@click.argument("prompt")
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--drafter", default="ngram", show_default=True, help="What proposes tokens, as name:option=value,…")
@click.option("--quantizer", default="w8a8", show_default=True, help="What makes the target; none: the full model.")
@click.option("--policy", default="auto", show_default=True, help="What accepts tokens.")
@click.option("--verifier", default="causal_lm", show_default=True, help="What runs the target.")
@click.option("--exact-to", type=click.Choice(["quantized", "full"]), default="quantized", show_default=True)
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-k", type=int, default=None)
@click.option("--top-p", type=float, default=None)
@click.option("--min-p", type=float, default=None)
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
    _prepare_terminal()
    from quasar.pipeline import Pipeline
    from quasar.progress import tracked_by
    from quasar.request import Request

    if prompt == "-":
        prompt = _read_prompt()
    settings = {name: options.pop(name) for name in _SETTINGS}
    asked = {**settings, "json_schema": options.pop("json_schema"), "regex": options.pop("regex")}
    Request.of(settings)  # refuse before the model is loaded
    constraint = _constraint(asked["json_schema"], asked["regex"])
    with tracked_by(_progress_bar):
        pipeline = Pipeline.from_pretrained(model, **options)
    if constraint is not None:
        settings["logits_processors"] = [constraint(pipeline.tokenizer)]
    result = _answer(pipeline, prompt, settings, speculate=not no_speculation, echo=not as_json)
    reference = pipeline.reference(prompt, **settings) if compare else None
    if as_json:
        print(json.dumps(_as_json(result, reference, {**pipeline.description, **asked})))
    else:
        _print_summary(result, reference)


_SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "logprobs", "seed", "stop", "raw")


def _constraint(schema_file: str | None, pattern: str | None) -> Callable[[Any], Processor] | None:
    """What makes the processor, once there is a tokenizer; refuses before that what it can."""
    if schema_file is not None and pattern is not None:
        raise click.UsageError("--json-schema and --regex exclude each other; give one of them")
    if schema_file is None and pattern is None:
        return None
    from quasar import constraints

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


def _prepare_terminal() -> None:
    # Bars of other libraries are for people; tqdm reads this when it is imported.
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def _progress_bar(items: Any, description: str) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not console.is_terminal)


def _as_json(result: GenerationResult, reference: GenerationResult | None, config: dict[str, Any]) -> dict[str, Any]:
    fields = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "guarantee": result.guarantee,
        "stats": result.stats,
        "config": config,
    }
    if result.logprobs is not None:
        fields["logprobs"] = [{"logprob": entry.logprob, "top": _finite(entry.top)} for entry in result.logprobs]
    if reference is not None:
        fields["reference"] = {
            "identical": result.token_ids == reference.token_ids,
            "token_ids": list(reference.token_ids),
            "stats": reference.stats,
        }
    return fields


def _finite(logprobs: Mapping[int, float]) -> dict[int, float]:
    """Without tokens of probability 0: JSON has no number for their logarithm."""
    return {token_id: value for token_id, value in logprobs.items() if value > float("-inf")}


def _print_summary(result: GenerationResult, reference: GenerationResult | None) -> None:
    from rich.console import Console
    from rich.table import Table

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # main decides; rich would end the program with status 1

    # No markup: a spec string in the guarantee may hold brackets.
    console = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False)
    table = Table("", "tokens", "steps", "acceptance length", "drafted", "accepted", "tokens/s")
    rows = {"this run": result} if reference is None else {"speculative": result, "target alone": reference}
    for name, row in rows.items():
        stats = row.stats
        table.add_row(
            name,
            str(stats["emitted_tokens"]),
            str(stats["steps"]),
            f"{stats['mean_acceptance_length']:.2f}",
            str(stats["drafted_tokens"]),
            str(stats["accepted_tokens"]),
            f"{stats['tokens_per_second']:.1f}",
        )
    console.print()
    console.print(table)
    if reference is not None:
        console.print(_comparison(result.token_ids, reference.token_ids))
    console.print(f"guarantee: {result.guarantee}", soft_wrap=True)


def _comparison(tokens: tuple[int, ...], reference: tuple[int, ...]) -> str:
    if tokens == reference:
        return f"identical: all {len(tokens)} tokens equal those of the target decoded one token a step"
    pairs = zip(tokens, reference, strict=False)
    fork = next((i for i, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(reference)))
    return f"NOT identical: the tokens differ from position {fork} on"


@cli.command()
@click.option("--model", default="smollm2", show_default=True, help="Hub id, folder, .gguf file, or smollm2.")
@click.option("--quantizer", default="w8a8", show_default=True, help="What makes the target; none: the full model.")
@click.option("--verifier", default="causal_lm", show_default=True, help="What runs the target.")
@click.option("--strict", is_flag=True, help="Measure the strict verifier.")
@click.option("--tokens", type=click.IntRange(min=16), default=64, show_default=True, help="Compared for each prompt.")
@click.option("--dtype", default=None, help="float32, bfloat16 or float16.  [default: float32 on a CPU]")
@click.option("--device", default=None, help="cpu, cuda, …  [default: cuda where available]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def parity(model: str, tokens: int, dtype: str | None, device: str | None, as_json: bool, **choices: Any) -> None:
    """Measure whether logits depend on the width of a forward, and how far the target is from the full model.

    Exits with 1 if they depend on it more than the verifier declares.
    """
    _prepare_terminal()
    from quasar.parity import as_json as as_object
    from quasar.parity import measure_model
    from quasar.progress import tracked_by

    with tracked_by(_progress_bar):
        invariance, agreement = measure_model(model, tokens=tokens, dtype=dtype, device=device, **choices)
    if as_json:
        print(json.dumps(as_object(invariance, agreement)))
    else:
        _print_parity(invariance, agreement)
    if not invariance.holds:
        raise SystemExit(1)


def _print_parity(invariance: InvarianceReport, agreement: AgreementReport) -> None:
    print(f"width invariance: declared {invariance.declared}, measured {invariance.measured}")
    print("width  largest |Δlogit|  argmax mismatches")
    for width, report in invariance.widths.items():
        print(f"{width:5}  {report.max_abs_diff:16.3g}  {report.argmax_mismatches:17}")
    for fork in invariance.forks[:10]:
        print(f"width {fork.width} chooses another token at position {fork.position}, where the gap is {fork.gap:.3g}")
    longest = max(agreement.runs, default=0)
    print(
        f"agreement with the full model on its own text: top-1 {agreement.top1:.4f}, KL {agreement.kl:.4f} nats over "
        f"{agreement.tokens} tokens; longest run of equal tokens {longest}"
    )


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--strict", is_flag=True, help="Exit with 2 if a plug-in is broken or a name is taken twice.")
def plugins(as_json: bool, strict: bool) -> None:
    """List the installed strategies, and the plug-ins that could not be loaded."""
    from quasar.plugins import load_plugins
    from quasar.registry import Registry

    registry = Registry(load_plugins())
    rows = [_row(entry.kind, entry.name, entry.origin, "ok") for entry in registry.entries()]
    rows += [_row(s.entry.kind, s.entry.name, s.entry.origin, "shadowed", str(s)) for s in registry.shadowed]
    rows += [
        _row("plug-in", plugin.origin.entry_point, plugin.origin, "broken", str(plugin.error))
        for plugin in registry.plugins
        if plugin.error is not None
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        _print_plugins(rows)
    if strict and (problems := registry.problems()):
        raise QuasarError(f"{len(problems)} problem(s): {'; '.join(problems)}")


def _row(kind: str, name: str, origin: Any, status: str, cause: str | None = None) -> dict[str, str | None]:
    return {
        "kind": kind,
        "name": name,
        "origin": origin.distribution,
        "version": origin.version,
        "entry_point": origin.entry_point,
        "status": status,
        "cause": cause,
    }


def _print_plugins(rows: list[dict[str, str | None]]) -> None:
    columns = ("kind", "name", "origin", "version", "status")
    widths = [max(len(column), *(len(row[column] or "") for row in rows)) for column in columns]
    head: dict[str, str | None] = {column: column.upper() for column in columns}
    for row in (head, *rows):
        cells = [(row[column] or "").ljust(width) for column, width in zip(columns, widths, strict=True)]
        print("  ".join(cells).rstrip())
    for row in rows:
        if row.get("cause"):
            print(f"\n{row['status']}: {row['cause']}")
