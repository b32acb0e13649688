"""What the command line prints. rich is imported where a bar of progress is shown, torch never."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quasar.commands.parity import AgreementReport
    from quasar.registry.registry import Registry
    from quasar.types import GenerationResult
    from quasar.verifiers.invariance import InvarianceReport


NATIVE = "quasar-native"
NATIVE_GAIN = "compiled kernels and a compiled verifier, with which CPUs decode several times as fast"


def prepare_terminal(*, quiet: bool = False) -> None:
    """Settings that libraries read when they are imported: bars of progress are for people, threads wait asleep.

    Threads of torch that spin after their work would be in the way of those of a compiled verifier.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if quiet or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def progress_bar(items: Any, description: str) -> Any:
    """A tracker for :func:`quasar.progress.tracked_by`: a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, description, console=console, transient=True, disable=not console.is_terminal)


def result_as_json(
    result: GenerationResult, reference: GenerationResult | None, config: dict[str, Any]
) -> dict[str, Any]:
    """The object that ``quasar generate --json`` prints; ``reference`` is what ``--compare`` compares with."""
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


def print_summary(result: GenerationResult, reference: GenerationResult | None, *, verbose: bool) -> None:
    """What one generation did, on standard error: the text alone is the output.

    One line for whoever watches; a table and the guarantee where they are asked for, by ``verbose`` or a comparison.
    """
    if not verbose and reference is None:
        if sys.stderr.isatty():
            print(f"\n{summary(result.stats)}", file=sys.stderr)
        return
    columns = {"this run": result} if reference is None else {"speculative": result, "target alone": reference}
    print(file=sys.stderr)
    for line in _counts({name: column.stats for name, column in columns.items()}):
        print(line, file=sys.stderr)
    if reference is not None:
        print(comparison(result.token_ids, reference.token_ids), file=sys.stderr)
    print(f"guarantee: {result.guarantee}", file=sys.stderr)


_WORTH_SAVING = 3.0
"""Seconds of loading and quantizing from which a saved model is worth a line."""


def offer_to_save(model: str, seconds: Mapping[str, float]) -> None:
    """Tell whoever watches how not to wait for the same thing again, where quantizing took long."""
    quantizing = seconds.get("quantize", 0.0)
    spent = seconds.get("load", 0.0) + quantizing
    if sys.stderr.isatty() and quantizing > 0.1 * _WORTH_SAVING and spent > _WORTH_SAVING:
        print(
            f"loading and quantizing took {spent:.0f} s; once is enough: quasar quantize --model {model} --out FOLDER, "
            "then --model FOLDER",
            file=sys.stderr,
        )


def print_timings(seconds: Mapping[str, float], stats: Mapping[str, Any]) -> None:
    """Where the time went, a stage a line, on standard error."""
    first = stats["time_to_first_token"]
    decoding = {
        "prefill": stats["prefill_seconds"],
        "first token": first - stats["prefill_seconds"],
        "decode": stats["total_seconds"] - first,
    }
    for stage, spent in {**seconds, **decoding}.items():
        print(f"{stage:12}{spent:8.2f} s", file=sys.stderr)


@contextmanager
def working(what: str, *, quiet: bool) -> Iterator[None]:
    """Say on a terminal what is being waited for, as long as it lasts."""
    shown = sys.stderr.isatty() and not quiet
    if shown:
        print(f"{what} …", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def summary(stats: Mapping[str, Any]) -> str:
    """The counts of one generation in less than 44 characters."""
    return (
        f"{stats['emitted_tokens']} tokens, {stats['mean_acceptance_length']:.2f} a step, "
        f"{stats['tokens_per_second']:.1f} a second"
    )


def _counts(columns: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A table with a row for each count: narrow, so that a terminal of 44 columns shows whole numbers."""
    rows = (
        ("tokens", "emitted_tokens", "d"),
        ("steps", "steps", "d"),
        ("tokens a step", "mean_acceptance_length", ".2f"),
        ("drafted", "drafted_tokens", "d"),
        ("accepted", "accepted_tokens", "d"),
        ("tokens a second", "tokens_per_second", ".1f"),
    )
    yield "".join([" " * 15, *(f"  {name:>12}" for name in columns)])
    for label, key, form in rows:
        yield "".join([f"{label:15}", *(f"  {format(stats[key], form):>12}" for stats in columns.values())])


def comparison(tokens: tuple[int, ...], reference: tuple[int, ...]) -> str:
    """Whether the tokens are identical, and the first position at which they are not."""
    if tokens == reference:
        return f"identical: all {len(tokens)} tokens equal those of the target decoded one token a step"
    pairs = zip(tokens, reference, strict=False)
    fork = next((i for i, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(reference)))
    return f"NOT identical: the tokens differ from position {fork} on"


def print_parity(invariance: InvarianceReport, agreement: AgreementReport) -> None:
    """The table by width, the first forks, and the agreement with the full model."""
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


def print_inspection(report: dict[str, Any]) -> None:
    """Options, the layers in columns, what was left alone and why, and the bytes."""
    print(", ".join(f"{name}={value}" for name, value in report["quantizer"].items()))
    columns = ("name", "shape", "bits", "nbytes", "kernel", "error")
    rows = [[_cell(layer.get(column)) for column in columns] for layer in report["layers"]]
    _print_columns([column.upper() for column in columns], rows)
    if report["skipped"]:
        print("\nleft as they are")
        _print_columns(["NAME", "REASON"], [[part["name"], part["reason"]] for part in report["skipped"]])
    if "sensitivity" in report:
        _print_sensitivity(report["sensitivity"])
    full, quantized = report["full_bytes"], report["quantized_bytes"]
    before = "" if full is None else f"{full / 1e6:.1f} MB before, "
    share = "" if full is None else f" after: {quantized / full:.2f} of it"
    print(f"\n{before}{quantized / 1e6:.1f} MB{share}")


def print_saved(report: dict[str, Any], folder: Path) -> None:
    """What was saved where, and how to use it."""
    full, quantized = report["full_bytes"], report["quantized_bytes"]
    print(f"{len(report['layers'])} layers quantized, {len(report['skipped'])} weights left as they are")
    print(f"{full / 1e6:.1f} MB before, {quantized / 1e6:.1f} MB after, in {folder}")
    print(f"use it with: quasar generate --model {folder.absolute()} …")


def _print_sensitivity(report: dict[str, Any]) -> None:
    print(f"\nKL by layers rounded alone, over {report['tokens']} tokens; all together: {report['kl']:.2e}")
    rows = [
        [layer["name"], str(layer["bits"]), str(layer["nbytes"]), f"{layer['kl']:.2e}", f"{layer['output_error']:.4f}"]
        for layer in report["layers"]
    ]
    _print_columns(["NAME", "BITS", "NBYTES", "KL", "OUTPUT ERROR"], rows)


def _cell(value: Any) -> str:
    if value is None:
        return "?"
    if isinstance(value, float):
        return f"{value:.4f}"
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print_columns(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def plugin_rows(registry: Registry) -> list[dict[str, str | None]]:
    """One row for each strategy, each name that is taken twice and each fault of a plug-in."""
    rows = [_row(entry.kind, entry.name, entry.origin, "ok") for entry in registry.entries()]
    rows += [_row(s.entry.kind, s.entry.name, s.entry.origin, "shadowed", str(s)) for s in registry.shadowed]
    rows += [
        _row("plug-in", plugin.origin.entry_point, plugin.origin, "broken", str(error))
        for plugin in registry.plugins
        for error in plugin.errors
    ]
    return rows


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


def print_plugins(rows: list[dict[str, str | None]]) -> None:
    """The rows in columns, then the causes, and what is not there but would make a difference."""
    columns = ("kind", "name", "origin", "version", "status")
    _print_columns([column.upper() for column in columns], [[row[column] or "" for column in columns] for row in rows])
    for row in rows:
        if row.get("cause"):
            print(f"\n{row['status']}: {row['cause']}")
    if not any(row["origin"] == NATIVE for row in rows):
        print(f"\nnot installed: {NATIVE} ({NATIVE_GAIN})")
