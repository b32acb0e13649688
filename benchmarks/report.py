"""All figures of benchmarks/README.md, measured in one process: ``python benchmarks/report.py --help``.

Every ratio is against transformers' ``generate`` of the full model in float32, on the same prompts, the same number
of new tokens and the same threads, in the same run. Warm-up is apart. Configurations take turns prompt by prompt, so
that a machine whose speed drifts slows all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import transformers

import quasar
from quasar import Draft, Pipeline
from quasar.checkpoints.models import load_model
from quasar.commands.parity import greedy_text, measure_agreement
from quasar.pipeline.prompts import encode_prompt

HERE = Path(__file__).parent
TARGETS: dict[str, dict[str, str]] = {
    "none": {"quantizer": "none"},
    "w8a8": {"quantizer": "w8a8"},
    "w8a8:lm_head=true": {"quantizer": "w8a8:lm_head=true"},
    "exact_to=full over w8a8:lm_head=true": {"quantizer": "w8a8:lm_head=true", "exact_to": "full"},
}
WIDTHS = (1, 2, 4, 6, 8, 16)


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    loaded = load_model(arguments.model)
    prompts = [encode_prompt(loaded.tokenizer, text) for text in _texts(arguments)]
    limit = loaded.model.config.max_position_embeddings - arguments.tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= min(limit, 1024)]
    pipelines = {
        name: Pipeline.from_model(loaded.model, loaded.tokenizer, drafter=arguments.drafter, **choices)
        for name, choices in TARGETS.items()
    }
    conditions = {**environment(arguments.model), "drafter": arguments.drafter, "new_tokens": arguments.tokens}
    report: dict[str, Any] = {"environment": conditions, "prompts": len(prompts)}
    report["speed"] = measure_speed(loaded.model, pipelines, prompts, arguments.tokens)
    report["agreement"] = agreement_with_the_full_model(pipelines, prompts, arguments.tokens)
    report["milliseconds_by_width"] = {
        name: step_milliseconds(pipe.verifier, WIDTHS) for name, pipe in pipelines.items()
    }
    print_report(report)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2), encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt, EOS ignored")
    parser.add_argument("--per-task", type=int, default=3, help="questions of each task of --data")
    parser.add_argument("--data", help="folder of Spec-Bench .jsonl files; without it, prompts.txt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="also write the report to this file")
    return parser.parse_args()


def _texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.data is None:
        return (HERE / "prompts.txt").read_text(encoding="utf-8").strip().split("\n\n")
    texts = []
    for file in sorted(Path(arguments.data).glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()[: arguments.per_task]
        texts += [json.loads(line)["turns"][0] for line in lines]
    return texts


def environment(model: str) -> dict[str, Any]:
    """What figures depend on beside the code that is measured."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    sha = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "quasar": f"{quasar.__version__} ({sha or 'no git'})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "model": model,
    }


def measure_speed(model: Any, pipelines: dict[str, Pipeline], prompts: list[list[int]], n: int) -> list[dict[str, Any]]:
    """Tokens per second of every configuration, prefill included, and whether the tokens are those of the target."""
    runs: dict[str, Callable[[list[int]], tuple[list[int], dict[str, Any]]]] = {
        "transformers generate": lambda ids: (_generate(model, ids, n), {}),
        "transformers prompt lookup": lambda ids: (_generate(model, ids, n, prompt_lookup_num_tokens=5), {}),
    }
    for name, pipe in pipelines.items():
        runs[f"quasar {name}, plain"] = lambda ids, pipe=pipe: _run(pipe.reference, ids, n)
        runs[f"quasar {name}, drafting"] = lambda ids, pipe=pipe: _run(pipe.generate_ids, ids, n)
    rows = {name: {"seconds": [], "tokens": [], "stats": []} for name in runs}
    for run in runs.values():
        run(prompts[0][:32])
    for prompt in prompts:
        for name, run in runs.items():
            began = perf_counter()
            tokens, stats = run(prompt)
            rows[name]["seconds"].append(perf_counter() - began)
            rows[name]["tokens"].append(tokens)
            rows[name]["stats"].append(stats)
    baseline = rows["transformers generate"]["seconds"]
    return [_speed_row(name, row, baseline, rows) for name, row in rows.items()]


def _speed_row(name: str, row: dict[str, Any], baseline: list[float], rows: dict[str, Any]) -> dict[str, Any]:
    alone = name.replace("prompt lookup", "generate").replace("drafting", "plain")
    same = [a == b for a, b in zip(row["tokens"], rows[alone]["tokens"], strict=True)]
    stats = [s for s in row["stats"] if s]
    steps = [s["total_seconds"] - s["prefill_seconds"] for s in stats]
    outside = [step - s["draft_seconds"] - s["verify_seconds"] for step, s in zip(steps, stats, strict=True)]
    return {
        "configuration": name,
        "tokens_per_s": sum(map(len, row["tokens"])) / sum(row["seconds"]),
        "ratio": sum(baseline) / sum(row["seconds"]),
        "median_ratio": median(b / s for b, s in zip(baseline, row["seconds"], strict=True)),
        "mean_acceptance_length": mean(s["mean_acceptance_length"] for s in stats) if stats else None,
        "identical_to_its_target": f"{sum(same)}/{len(same)}",
        "loop_share": sum(outside) / sum(steps) if stats else None,
    }


def _generate(model: Any, ids: list[int], n: int, **options: Any) -> list[int]:
    # EOS is switched off on both sides: every configuration makes the same number of tokens.
    inputs = torch.tensor([ids])
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return output[0, len(ids) :].tolist()


def _run(call: Callable[..., Any], ids: list[int], n: int) -> tuple[list[int], dict[str, Any]]:
    result = call(ids, max_new_tokens=n, eos_token_id=None)
    return list(result.token_ids), result.stats


def agreement_with_the_full_model(
    pipelines: dict[str, Pipeline], prompts: list[list[int]], n: int
) -> dict[str, dict[str, float]]:
    """Top-1 agreement and mean KL(full ‖ target), on the full model's own greedy text."""
    full = pipelines["none"].verifier
    texts = [(len(prompt), greedy_text(full, prompt, n)) for prompt in prompts]
    reports = {name: measure_agreement(full, pipe.verifier, texts) for name, pipe in pipelines.items()}
    return {name: {"top1": report.top1, "kl": report.kl, "tokens": report.tokens} for name, report in reports.items()}


def step_milliseconds(verifier: Any, widths: Sequence[int], repeats: int = 30) -> dict[int, float]:
    """Median of one verify forward by width, over a context of 128 tokens."""
    session, result = verifier.start(list(range(100, 228))), {}
    for width in widths:
        draft, seconds = Draft(range(300, 300 + width - 1)), []
        for _ in range(repeats + 3):
            began = perf_counter()
            session.verify(draft)
            seconds.append(perf_counter() - began)
        result[width] = 1000 * median(seconds[3:])
    return result


def print_report(report: dict[str, Any]) -> None:
    """Markdown, as it stands in benchmarks/README.md."""
    environment = {**report["environment"], "prompts": report["prompts"]}
    print("; ".join(f"{key} {value}" for key, value in environment.items()) + "\n")
    print("| configuration | tokens_per_s | ratio | median_ratio | mean_acceptance_length | identical | loop_share |")
    print("|---|---|---|---|---|---|---|")
    for row in report["speed"]:
        length = "" if row["mean_acceptance_length"] is None else f"{row['mean_acceptance_length']:.2f}"
        share = "" if row["loop_share"] is None else f"{100 * row['loop_share']:.1f} %"
        print(
            f"| {row['configuration']} | {row['tokens_per_s']:.1f} | {row['ratio']:.2f} | {row['median_ratio']:.2f} "
            f"| {length} | {row['identical_to_its_target']} | {share} |"
        )
    print("\n| target | top1 | kl | tokens |\n|---|---|---|---|")
    for name, row in report["agreement"].items():
        print(f"| {name} | {row['top1']:.4f} | {row['kl']:.4f} | {row['tokens']:.0f} |")
    print("\n| target |", " | ".join(f"{width} wide" for width in WIDTHS), "|\n|---" + "|---" * len(WIDTHS) + "|")
    for name, row in report["milliseconds_by_width"].items():
        print(f"| {name} |", " | ".join(f"{row[width]:.1f}" for width in WIDTHS), "|")


if __name__ == "__main__":
    sys.exit(main())
