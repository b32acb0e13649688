"""``quasar generate``: answer a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quasar.commands import console
from quasar.commands.cli import early, options
from quasar.commands.cli.prompt import prompt_of
from quasar.errors import QuasarError
from quasar.progress import tracked_by
from quasar.timings import timed, timings

if TYPE_CHECKING:
    from quasar.loop.processing import Processor
    from quasar.pipeline.pipeline import Pipeline
    from quasar.pipeline.prompts import Prompt
    from quasar.types import GenerationResult

_strategies = options.stacked(
    click.option(
        "-d", "--drafter", default="ngram", show_default=True, help="What proposes tokens, as name:option=value,…"
    ),
    options.quantizer("auto"),
    click.option("-p", "--policy", default="auto", show_default=True, help="What decides which tokens are kept."),
    options.verifier,
    click.option(
        "--exact-to",
        type=click.Choice(["quantized", "full"]),
        default="quantized",
        show_default=True,
        help="Whose output to reproduce: the quantized model's, or the full one's, for which the quantized one drafts.",
    ),
)
_sampling = options.stacked(
    click.option(
        "-n", "--max-new-tokens", type=int, default=128, show_default=True, help="Generate at most this many."
    ),
    click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0: no sampling."),
    click.option("--top-k", type=int, help="Sample only from the k most probable tokens."),
    click.option("--top-p", type=float, help="Then only from the most probable that reach p together."),
    click.option("--min-p", type=float, help="Then only from those at least this fraction as probable as the best."),
    click.option("--repetition-penalty", type=float, help="Above 1: make tokens that occurred less probable."),
    click.option("--no-repeat-ngram-size", type=int, help="Never repeat a run of this many tokens."),
    click.option("--min-new-tokens", type=int, help="Do not end before this many tokens."),
    click.option("--logprobs", type=int, help="Report this many candidates for each token; needs --json."),
    click.option("-s", "--seed", type=int, default=0, show_default=True, help="Seed for sampling."),
)
_text = options.stacked(
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--json-schema", type=click.Path(), help="File with a JSON schema for the output."),
    click.option("--regex", help="Regular expression that the whole output must match."),
    click.option("--system", help="System message to put before the prompt."),
    click.option(
        "--template-option", multiple=True, help="key=value for the chat template; may be given several times."
    ),
    click.option("--raw", is_flag=True, help="Do not apply the model's chat template."),
    click.option("--show-special-tokens", is_flag=True, help="Keep special tokens in the text."),
)
_running = options.stacked(
    options.placement,
    options.calibration,
    click.option("--strict", is_flag=True, help="Make logits bit-identical at any width, or fail; slower."),
    click.option("--no-speculation", is_flag=True, help="Generate one token a step, without drafts."),
    click.option("--compare", is_flag=True, help="Generate once more without drafts, and compare the tokens."),
)
_printing = options.stacked(
    options.as_json("one JSON object instead of text"),
    click.option("-v", "--verbose", is_flag=True, help="Print counts and the guarantee after the text."),
    click.option("--timings", is_flag=True, help="Print where the time went, to standard error."),
    click.option("-q", "--quiet", is_flag=True, help="Print only the text, and errors."),
)


@click.command()
@click.argument("prompt", required=False)
@options.model
@_strategies
@_sampling
@_text
@_running
@_printing
def generate(prompt: str | None, model: str, **asked: Any) -> None:
    """Answer a prompt.

    Without PROMPT, or with "-" in its place, it is read from standard input. 'quasar plugins' lists what can be named
    as drafter, quantizer, policy and verifier.
    """
    printing = {name: asked.pop(name) for name in ("as_json", "verbose", "quiet")}
    show_timings = asked.pop("timings")
    compare, speculate = asked.pop("compare"), not asked.pop("no_speculation")
    _check_combination(asked, compare=compare, speculate=speculate, **printing)
    console.prepare_terminal(quiet=printing["quiet"])
    question = prompt_of(prompt, asked.pop("system"), raw=asked["raw"])
    constraint = {name: asked.pop(name) for name in ("json_schema", "regex")}
    settings = {name: asked.pop(name) for name in _SETTINGS}
    settings["skip_special_tokens"] = not asked.pop("show_special_tokens")
    settings["template_options"] = early.template_options(asked.pop("template_option"))
    early.check_names(asked)
    early.check_settings(settings)
    early.check_budget(model, settings["max_new_tokens"])
    early.check_policy(settings, asked["policy"])
    make_processor = _constraint(**constraint)
    with timings() as seconds:
        pipeline = _pipeline(model, asked, quiet=printing["quiet"])
    described = {**pipeline.description, **settings, **constraint}
    if make_processor is not None:
        settings["logits_processors"] = [make_processor(pipeline.tokenizer)]
    result = _answer(pipeline, question, settings, speculate=speculate, echo=not printing["as_json"])
    reference = pipeline.reference(question, **settings) if compare else None
    if printing["as_json"]:
        print(json.dumps(console.result_as_json(result, reference, described)))
    elif not printing["quiet"]:
        console.print_summary(result, reference, verbose=printing["verbose"])
        console.offer_to_save(model, seconds)
    if show_timings:
        console.print_timings(seconds, result.stats)


_SETTINGS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "logprobs", "seed", "stop", "raw"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)


def _check_combination(
    asked: dict[str, Any], *, compare: bool, speculate: bool, as_json: bool, verbose: bool, quiet: bool
) -> None:
    if compare and not speculate:
        raise click.UsageError("--compare compares with decoding without speculation; leave out --no-speculation")
    if asked["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs is reported in JSON only; add --json")
    if quiet and not as_json and (verbose or compare):
        raise click.UsageError(f"--quiet and --{'verbose' if verbose else 'compare'} exclude each other")


def _pipeline(model: str, choices: dict[str, Any], *, quiet: bool) -> Pipeline:
    with console.working("importing torch and transformers", quiet=quiet), timed("import"):
        import quasar.checkpoints.models  # noqa: F401 - brings transformers in, which a pipeline imports late
        from quasar.pipeline.pipeline import Pipeline
    with nullcontext() if quiet else tracked_by(console.progress_bar):
        return Pipeline.from_pretrained(model, **choices)


def _constraint(json_schema: str | None, regex: str | None) -> Callable[[Any], Processor] | None:
    """What makes the processor, once there is a tokenizer; refuses before that what it can."""
    if json_schema is not None and regex is not None:
        raise click.UsageError("--json-schema and --regex exclude each other; give one of them")
    if json_schema is None and regex is None:
        return None
    from quasar.pipeline import constraints

    if regex is not None:
        constraints.check_regex(regex)
        return partial(constraints.regex, regex)
    try:
        schema = Path(str(json_schema)).read_text(encoding="utf-8-sig")
        constraints.check_json_schema(schema)
    except (OSError, ValueError) as error:
        raise QuasarError(f"--json-schema {json_schema}: {error}") from error
    return partial(constraints.json_schema, schema)


def _answer(
    pipeline: Pipeline, prompt: Prompt, settings: dict[str, Any], *, speculate: bool, echo: bool
) -> GenerationResult:
    """Decode, and print the text to standard output as it is made if ``echo``."""
    if not speculate:
        result = pipeline.reference(prompt, **settings)
        if echo:
            print(result.text)
        return result
    stream = pipeline.stream(prompt, **settings)
    try:
        for chunk in stream:
            if echo:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    finally:  # also after Ctrl-C
        if echo:
            print()
    return stream.result
