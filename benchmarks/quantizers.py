"""What each quantizer makes of a model, in numbers: ``python benchmarks/quantizers.py --help``.

Bits and bytes, agreement with the loaded weights, perplexity, seconds and memory to quantize, milliseconds a step. Each
quantizer is measured in a process of its own, so that its peak of memory is its own too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter
from typing import Any

import torch
from report import environment, step_milliseconds

from quasar.checkpoints.models import load_model
from quasar.commands.inspect import tensor_bytes
from quasar.commands.parity import greedy_text, measure_agreement
from quasar.pipeline.plan import Plan
from quasar.pipeline.prompts import encode_prompt
from quasar.progress import track

QUANTIZERS = (
    "none",
    "w8a8",
    "w8a8:lm_head=true",
    "w8a8:group=32",
    "gguf",
    "gguf:activations=int8_per_group",
    "hqq:bits=8,group=64",
    "hqq:bits=4,group=64",
    "hqq:bits=4,group=64,activations=int8_per_group",
    "hqq:bits=3,group=64",
    "hqq:bits=2,group=16",
    "gptq:bits=4,group=64",
    "gptq:bits=3,group=64",
    "awq:bits=4,group=64",
    "awq:bits=3,group=64",
)
TEXT_TOPICS = ("assignment", "exceptions", "import", "with")
MEGABYTE = 1e6


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    if arguments.one:
        print(json.dumps(measure(arguments.model, arguments.one, arguments)))
        return
    rows = [_in_a_process(spec, arguments) for spec in track(arguments.quantizers, "quantizers")]
    print_table(rows, environment(arguments.model))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128, help="of the model's own text, for each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("quantizers", nargs="*", default=QUANTIZERS, help="spec strings")
    return parser.parse_args()


def _in_a_process(spec: str, arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--model", arguments.model, "--tokens", str(arguments.tokens), "--threads", str(arguments.threads)]
    command = [sys.executable, __file__, "--one", spec, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{spec}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def measure(name: str, spec: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    loaded = load_model(name)
    plan = Plan.of({"quantizer": spec})
    calibration = plan.calibration_for(loaded.model, loaded.tokenizer)
    before, began = _memory("VmRSS"), perf_counter()
    _forget_the_peak()
    made = plan.quantizer.quantize(loaded.model, calibration)
    quantized: Any = made.model
    seconds, peak = perf_counter() - began, _memory("VmHWM")
    full, verifier = plan.verifier_of(loaded.model), plan.verifier_of(quantized)
    prompts = [encode_prompt(loaded.tokenizer, text) for text in _held_out()]
    texts = [(len(prompt), greedy_text(full, prompt, arguments.tokens)) for prompt in prompts]
    agreement = measure_agreement(full, verifier, texts)
    layers = made.report.get("layers", [])
    return {
        "quantizer": spec,
        "bits": _mean_bits(layers),
        "record_mb": sum(layer["nbytes"] for layer in layers) / MEGABYTE or None,
        "model_mb": tensor_bytes(quantized) / MEGABYTE,
        "top1": agreement.top1,
        "kl": agreement.kl,
        "tokens": agreement.tokens,
        "perplexity": perplexity(quantized, loaded.tokenizer),
        "seconds": seconds,
        "peak_mb": (peak - before) / MEGABYTE,
        "ms": step_milliseconds(verifier, (1, 8)),
    }


def _held_out() -> list[str]:
    """Prompts that are not those of the calibration."""
    return (Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").strip().split("\n\n")


def _mean_bits(layers: list[dict[str, Any]]) -> float | None:
    """Bits a weight of the quantized layers takes where values are packed, scales and zero points included."""
    n_values = sum(layer["shape"][0] * layer["shape"][1] for layer in layers)
    beside = sum(layer["nbytes"] - layer["shape"][0] * layer["shape"][1] for layer in layers)
    values = sum(layer["bits"] * layer["shape"][0] * layer["shape"][1] for layer in layers)
    return (values + 8 * beside) / n_values if n_values else None


def _memory(which: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at the peak; Linux only."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def _forget_the_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """Of a text that comes with every Python, 512 tokens at a time."""
    text = "\n\n".join(topics[name] for name in TEXT_TOPICS)
    token_ids = torch.tensor(tokenizer.encode(text)[: 512 * 8])
    losses = []
    for window in token_ids.split(512):
        logits = model(window[None]).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return float(torch.exp(sum(losses) / (len(token_ids) - len(losses))))


def print_table(rows: list[dict[str, Any]], conditions: dict[str, Any]) -> None:
    """Markdown, as it stands in benchmarks/README.md."""
    print("; ".join(f"{key} {value}" for key, value in conditions.items()) + "\n")
    head = ("quantizer", "bits", "layers MB", "model MB", "top-1", "KL", "perplexity", "s", "peak MB", "ms, 1", "ms, 8")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in rows:
        bits, layers = (row["bits"] or 32.0), row["record_mb"]
        cells = (
            row["quantizer"],
            f"{bits:.2f}",
            "" if layers is None else f"{layers:.0f}",
            f"{row['model_mb']:.0f}",
            f"{row['top1']:.3f}",
            f"{row['kl']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['peak_mb']:.0f}",
            *(f"{row['ms'][width]:.1f}" for width in row["ms"]),
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
