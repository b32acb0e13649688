"""Is speculative output token-identical to plain decoding on a real model? ``python benchmarks/identity.py --help``.

For every prompt and every k, greedy and sampled, the tokens are compared with those of the target decoded alone, one
token a step. Each difference is reported with its position and with the gap, in nats, between the two best choices
there. No time is measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import quasar
from quasar import GenerationResult, Pipeline
from quasar.checkpoints.models import load_model
from quasar.pipeline.prompts import encode_prompt

HERE = Path(__file__).parent


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model)
    prompts = [encode_prompt(loaded.tokenizer, text) for text in _texts(arguments)]
    prompts = [prompt for prompt in prompts if len(prompt) <= arguments.max_prompt][: arguments.prompts]
    choices = {"quantizer": arguments.quantizer, "exact_to": arguments.exact_to, "strict": arguments.strict}
    pipe = Pipeline.from_model(loaded.model, loaded.tokenizer, drafter="none", **choices)
    cascade = Pipeline.from_model(loaded.model, loaded.tokenizer, **choices) if arguments.exact_to == "full" else None
    pipes = {"cascade": cascade} if cascade else {f"k={k}": _drafting(pipe, k) for k in arguments.k}
    for temperature in arguments.temperature:
        report = compare(pipe, pipes, prompts, arguments.tokens, temperature)
        print(json.dumps({"quasar": quasar.__version__, **vars(arguments), "temperature": temperature, **report}))


def _drafting(pipe: Pipeline, k: int) -> Pipeline:
    return Pipeline(pipe.verifier, drafter=f"ngram:k={k}", exact_to=pipe.exact_to)


class Counted:
    """A drafter, and how many of its drafts were not empty and kept whole."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.needs = drafter, drafter.needs
        self.drafts = self.whole = 0

    def start(self, prompt_ids: Any, sampling: Any) -> CountedSession:
        return CountedSession(self, self.drafter.start(prompt_ids, sampling, None))


class CountedSession:
    def __init__(self, counts: Counted, session: Any) -> None:
        self.counts, self.session, self.length = counts, session, 0

    def propose(self, max_tokens: int) -> Any:
        draft = self.session.propose(max_tokens)
        self.length = len(draft)
        return draft

    def commit(self, token_ids: Any, verification: Any) -> None:
        self.counts.drafts += self.length > 0
        self.counts.whole += 0 < self.length < len(token_ids)
        self.session.commit(token_ids, verification)


def compare(
    plain: Pipeline, pipes: dict[str, Pipeline], prompts: list[list[int]], tokens: int, temperature: float
) -> dict[str, Any]:
    """For each pipeline how many prompts have identical tokens, and every first difference."""
    found: dict[str, dict[str, Any]] = {
        name: {
            "identical": 0,
            "prompts": 0,
            "steps": 0,
            "tokens": 0,
            "accepted": 0,
            "drafted": 0,
            "drafts": 0,
            "whole": 0,
            "differences": [],
        }
        for name in pipes
    }
    for pipe in pipes.values():
        pipe.drafter = Counted(pipe.drafter)
    settings = {"max_new_tokens": tokens, "temperature": temperature, "eos_token_id": None}
    for i, prompt in enumerate(prompts):
        reference = plain.reference(prompt, logprobs=2, seed=i, **settings)
        for name, pipe in pipes.items():
            result = pipe.generate_ids(prompt, seed=i, **settings)
            row = found[name]
            row["prompts"] += 1
            row["steps"] += result.stats["steps"]
            row["tokens"] += tokens
            row["drafted"] += result.stats["drafted_tokens"]
            row["accepted"] += result.stats["accepted_tokens"]
            row["drafts"], row["whole"] = pipe.drafter.drafts, pipe.drafter.whole
            if result.token_ids == reference.token_ids:
                row["identical"] += 1
            else:
                row["differences"].append(_first_difference(i, result, reference))
    return found


def _first_difference(prompt: int, result: GenerationResult, reference: GenerationResult) -> dict[str, Any]:
    pairs = zip(result.token_ids, reference.token_ids, strict=True)
    position = next(i for i, (token, other) in enumerate(pairs) if token != other)
    best = sorted(reference.logprobs[position].top.values(), reverse=True)
    return {"prompt": prompt, "position": position, "gap": best[0] - best[1]}


def _texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.data is None:
        return (HERE / "prompts.txt").read_text(encoding="utf-8").strip().split("\n\n")
    files = [file.read_text(encoding="utf-8").splitlines() for file in sorted(Path(arguments.data).glob("*.jsonl"))]
    longest = max(map(len, files))
    lines = [lines[i] for i in range(longest) for lines in files if i < len(lines)]  # the tasks take turns
    return [json.loads(line)["turns"][0] for line in lines]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantizer", default="w8a8")
    parser.add_argument("--exact-to", default="quantized", choices=["quantized", "full"])
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 5, 12], help="of the n-gram drafter")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt, EOS ignored")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-prompt", type=int, default=256, help="leave out prompts of more tokens")
    parser.add_argument("--data", help="folder of Spec-Bench .jsonl files; without it, prompts.txt")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
