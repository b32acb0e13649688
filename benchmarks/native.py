"""The compiled engine against memory, transformers and llama.cpp: ``python benchmarks/native.py --help``.

All in one process with the same threads. A step is compared with the time that reading its weights takes at the
bandwidth measured between its repeats, for that of a virtual machine comes and goes; decoding with transformers'
``generate`` and, where ``llama-cpp-python`` is installed, with llama.cpp's plain decode of the same model at the same
bits. Configurations take turns question by question. Speeds are those of decoding; reading the prompt is timed apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from report import environment, step_milliseconds
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar.pipeline.plan import Plan
from quasar.pipeline.prompts import encode_prompt
from quasar.progress import track
from quasar.registry.registry import default_registry
from quasar.weights.provenance import source_of

WIDTHS = (1, 2, 4, 8, 16)
SPECS = {
    "W8A8": "w8a8:lm_head=true",
    "W8A8, groups of 32": "w8a8:group=32,lm_head=true",
    "4 bits, groups of 32": "{gguf_or_hqq}",
    "float32": "none",
}
SHAPES = {
    "Qwen3-0.6B's shape": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B's shape": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    print("; ".join(f"{key} {value}" for key, value in environment("smollm2").items()) + "\n")
    if not arguments.no_steps:
        print_steps(random_weights=not arguments.smollm2_only)
    if arguments.data:
        print_decoding(arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-steps", action="store_true", help="leave out the table of single steps")
    parser.add_argument("--smollm2-only", action="store_true", help="leave out the models of random weights")
    parser.add_argument("--data", help="folder of Spec-Bench .jsonl files; without it, nothing is decoded")
    parser.add_argument("--per-task", type=int, default=8, help="questions of each task")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a question, EOS ignored")
    return parser.parse_args()


def read_bandwidth(buffer: torch.Tensor, repeats: int = 3) -> float:
    """Bytes a second that torch reads at best from a buffer that no cache holds."""
    seconds = []
    for _ in range(repeats):
        for read in (buffer.sum, lambda: torch.dot(buffer, buffer)):
            began = perf_counter()
            read()
            seconds.append(perf_counter() - began)
    return buffer.nbytes / min(seconds)


def print_steps(*, random_weights: bool, rounds: int = 7) -> None:
    """Milliseconds of one verify forward by width over a context of 128 tokens, and of reading its weights once.

    Bandwidth and steps are measured in turns; a figure is the median over the rounds, a ratio that of the ratios within
    a round.
    """
    buffer = torch.ones(1 << 26)
    print(f"| model | weights | MB | GB/s | floor | {' | '.join(f'{w} wide' for w in WIDTHS)} | 1 ÷ floor | 8 ÷ 1 |")
    print(f"|---|---|---|---|---|{'---|' * (len(WIDTHS) + 2)}")
    for name, weights, verifier in _verifiers(random_weights):
        megabytes = verifier.describe()["bytes_per_forward"] / 1e6
        measured = [
            (read_bandwidth(buffer) / 1e9, step_milliseconds(verifier, WIDTHS, repeats=10)) for _ in range(rounds)
        ]
        cells = [
            f"{megabytes:.0f}",
            f"{median(bandwidth for bandwidth, _ in measured):.1f}",
            f"{median(megabytes / bandwidth for bandwidth, _ in measured):.1f}",
            *(f"{median(times[width] for _, times in measured):.1f}" for width in WIDTHS),
            f"{median(times[1] * bandwidth / megabytes for bandwidth, times in measured):.2f}",
            f"{median(times[8] / times[1] for _, times in measured):.2f}",
        ]
        print(f"| {name} | {weights} | {' | '.join(cells)} |", flush=True)


def _verifiers(random_weights: bool) -> Iterator[tuple[str, str, Any]]:
    loaded = load_model("smollm2")
    for weights, spec in _specs("gguf:activations=int8_per_group,lm_head=true").items():
        yield "SmolLM2-135M", weights, _native(loaded.model, loaded.tokenizer, spec)
    del loaded
    for name, config in SHAPES.items() if random_weights else ():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weights, spec in _specs("hqq:bits=4,group=32,activations=int8_per_group,lm_head=true").items():
            if weights != "float32":
                yield name, weights, _native(model, None, spec)
        del model


def _specs(four_bits: str) -> dict[str, str]:
    return {weights: spec.format(gguf_or_hqq=four_bits) for weights, spec in SPECS.items()}


def _native(model: Any, tokenizer: Any, spec: str) -> Any:
    plan = Plan.of({"quantizer": spec})
    quantized = plan.quantizer.quantize(model, plan.calibration_for(model, tokenizer)).model
    return default_registry().build("verifier", "native", quantized)


def print_decoding(arguments: argparse.Namespace) -> None:
    """Tokens a second of every configuration, as the mean over tasks, and the ratios that are asked of them."""
    loaded = load_model("smollm2")
    questions = _questions(arguments, loaded.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        runs = _runs(loaded, Path(folder), arguments)
        speeds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runs}
        for run in runs.values():
            run(questions[0][1][:32], 8)
        for task, prompt in track(questions, "questions"):
            for name, run in runs.items():
                speeds[name][task].append(run(prompt, arguments.tokens))
    means = {name: mean(mean(values) for values in tasks.values()) for name, tasks in speeds.items()}
    tasks = list(dict.fromkeys(task for task, _ in questions))
    print(f"\n| tokens/s of decoding | mean over tasks | {' | '.join(tasks)} |\n|---|---|{'---|' * len(tasks)}")
    for name, by_task in speeds.items():
        print(f"| {name} | {means[name]:.1f} | {' | '.join(f'{mean(by_task[task]):.1f}' for task in tasks)} |")
    print("\n| ratio | |\n|---|---|")
    for name, over in RATIOS:
        if name in means and over in means:
            print(f"| {name} ÷ {over} | {means[name] / means[over]:.2f} |")


QUANTIZED, FULL, PLAIN_FULL = "exact_to=quantized", "exact_to=full", "full model, same drafter"
RATIOS = (
    (QUANTIZED, "llama.cpp Q8_0"),
    (FULL, "llama.cpp F32"),
    (QUANTIZED, "transformers generate"),
    (FULL, "transformers generate"),
    (QUANTIZED, PLAIN_FULL),
)


def _questions(arguments: argparse.Namespace, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Task and prompt, the tasks in turns."""
    by_task = {}
    for file in sorted(Path(arguments.data).glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        prompts = [encode_prompt(tokenizer, json.loads(line)["turns"][0]) for line in lines]
        by_task[file.stem] = [prompt for prompt in prompts if len(prompt) <= 1024][: arguments.per_task]
    return [(task, prompts[i]) for i in range(arguments.per_task) for task, prompts in by_task.items()]


def _runs(loaded: Any, folder: Path, arguments: argparse.Namespace) -> dict[str, Callable[[list[int], int], float]]:
    """Each configuration: a prompt and a number of new tokens to tokens a second."""
    pipelines = {
        QUANTIZED: {"quantizer": "w8a8:lm_head=true"},
        f"{QUANTIZED}, no drafter": {"quantizer": "w8a8:lm_head=true", "drafter": "none"},
        FULL: {"quantizer": "w8a8:lm_head=true", "exact_to": "full"},
        PLAIN_FULL: {"quantizer": "none"},
        "full model, no drafter": {"quantizer": "none", "drafter": "none"},
    }
    runs: dict[str, Callable[[list[int], int], float]] = {}
    for name, choices in pipelines.items():
        pipe = Pipeline.from_model(loaded.model, loaded.tokenizer, verifier="native", **choices)  # type: ignore[arg-type]
        runs[name] = lambda prompt, n, pipe=pipe: _decode(pipe, prompt, n)
    runs["transformers generate"] = lambda prompt, n: _generate(loaded.model, prompt, n)
    if find_spec("llama_cpp") is not None:
        for kind, file in _llama_files(source_of(loaded.model), folder):
            llama = _llama(file, arguments.threads)
            runs[f"llama.cpp {kind}"] = lambda prompt, n, llama=llama: _llama_decode(llama, prompt, n)
    return runs


def _decode(pipe: Pipeline, prompt: list[int], n: int) -> float:
    stats = pipe.generate_ids(prompt, max_new_tokens=n, eos_token_id=None).stats
    return stats["emitted_tokens"] / (stats["total_seconds"] - stats["prefill_seconds"])


def _generate(model: Any, prompt: list[int], n: int) -> float:
    """Without the time of the first token, which reads the prompt; of a quarter of the tokens, for it is slow."""
    inputs, n, seconds = torch.tensor([prompt]), max(2, n // 4), []
    for tokens in (1, n):
        began = perf_counter()
        model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds.append(perf_counter() - began)
    return (n - 1) / (seconds[1] - seconds[0])


def _llama_files(source: Path | None, folder: Path) -> Iterator[tuple[str, Path]]:
    """The demo model's file in other formats, written by llama.cpp itself."""
    import llama_cpp

    for kind, number in (("Q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("F32", llama_cpp.LLAMA_FTYPE_ALL_F32)):
        target, options = folder / f"{kind}.gguf", llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = number, True
        if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options) != 0:
            sys.exit(f"llama.cpp cannot write {target}")
        yield kind, target


def _llama(file: Path, threads: int) -> Any:
    from llama_cpp import Llama

    return Llama(str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)


def _llama_decode(llama: Any, prompt: list[int], n: int) -> float:
    """Greedy, one token a step, through the lowest call that llama-cpp-python has: no sampler's work is counted."""
    import numpy

    llama.reset()
    llama.eval(prompt)
    began = perf_counter()
    for _ in range(n):
        scores = llama._ctx.get_logits_ith(-1)
        token_id = int(numpy.argmax(numpy.ctypeslib.as_array(scores, shape=(llama.n_vocab(),))))
        llama.eval([token_id])
    return n / (perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
