"""What choosing tokens costs: ``python benchmarks/sampling.py``.

One row of logits at real vocabulary sizes, peaked as a language model's and flat, and steps a second of sampled against
greedy decoding with the compiled engine. Ways take turns; times of a row are minimums, ratios of steps medians over the
turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import numpy as np
import torch

from quasar import Pipeline
from quasar.loop.sampling import Sampling
from quasar.pipeline.calibration import own_prompts

WAYS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "top-k 50, top-p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}
SPREADS = {"peaked": 3.0, "flat": 1.0}


def main() -> None:
    arguments = _parse()
    print("| one row, ms | " + " | ".join(f"{v}, {kind}" for v in arguments.vocab for kind in SPREADS) + " |")
    print("|---|" + "---|" * (len(arguments.vocab) * len(SPREADS)))
    for name, how in WAYS.items():
        sampling = Sampling(**how)  # type: ignore[arg-type]
        cells = [row_ms(sampling, v, spread) for v in arguments.vocab for spread in SPREADS.values()]
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    if arguments.model:
        print_steps(arguments)


def row_ms(sampling: Sampling, vocab_size: int, spread: float) -> float:
    """Milliseconds to choose from one row, the least of many."""
    values = np.random.default_rng(0).standard_normal(vocab_size) * spread
    row = torch.from_numpy(values.astype(np.float32))
    positions = iter(range(10**9))

    def choose() -> int:
        return sampling.at(next(positions)).choose(row)

    return min(timeit.repeat(choose, number=5, repeat=200)) / 5 * 1e3


def print_steps(arguments: argparse.Namespace) -> None:
    """Steps a second of each way against greedy decoding in the same turn, and where the time goes."""
    pipe = Pipeline.from_pretrained(arguments.model, quantizer=arguments.quantizer, verifier=arguments.verifier)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for text in own_prompts()[: arguments.prompts]:
        for name, how in WAYS.items():
            settings = {**how, "max_new_tokens": arguments.tokens, "eos_token_id": None}
            measured[name].append(timed(lambda text=text, settings=settings: pipe.generate(text, **settings).stats))
    print("\n| way | steps/s | ratio to greedy | outside draft and verify |\n|---|---|---|---|")
    for name, runs in measured.items():
        ratio = statistics.median(run[0] / base[0] for run, base in zip(runs, measured["greedy"], strict=True))
        rate, share = (statistics.median(run[i] for run in runs) for i in range(2))
        print(f"| {name} | {rate:.0f} | {ratio:.3f} | {100 * share:.1f} % |")


def timed(generate: Callable[[], dict[str, float]]) -> tuple[float, float]:
    """Steps a second after the prompt, and the share of that time outside draft and verify: the better of two runs."""
    best = (0.0, 1.0)
    for _ in range(2):
        begin = time.perf_counter()
        stats = generate()
        seconds = time.perf_counter() - begin - stats["prefill_seconds"]
        share = 1 - (stats["draft_seconds"] + stats["verify_seconds"]) / seconds
        best = max(best, (stats["steps"] / seconds, share))
    return best


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--model", default="smollm2", help="empty: rows only")
    parser.add_argument("--quantizer", default="w8a8:lm_head=true")
    parser.add_argument("--verifier", default="native")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    main()
