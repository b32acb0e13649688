"""How often is a drawn token accepted: ``coupled`` against ``rejection``? ``python benchmarks/acceptance.py``.

The drafter is the quantized model, the target the full one, on texts that the full model sampled. Both chances are
computed exactly from the two distributions at each position; nothing is drawn.

* ``rejection``: ``sum_x min(p_x, q_x)``, the most that any policy can reach for one token.
* ``coupled``: the two tokens are the argmin of ``E_x / p_x`` and of ``E_x / q_x`` with one exponential ``E``, hence the
  same with chance ``sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)`` (Daliri et al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar.loop.sampling import Sampling
from quasar.pipeline.calibration import own_prompts
from quasar.pipeline.prompts import encode_prompt
from quasar.verifiers.invariance import logits_at_width

_NEGLIGIBLE = 1e-7


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model)
    full = Pipeline.from_model(loaded.model, loaded.tokenizer, quantizer="none", drafter="none")
    quantized = Pipeline.from_model(loaded.model, loaded.tokenizer, quantizer=arguments.quantizer)
    prompts = [encode_prompt(loaded.tokenizer, text) for text in own_prompts()[: arguments.prompts]]
    print("| temperature | rejection | coupled | at least (1 − d) / (1 + d) | positions |\n|---|---|---|---|---|")
    for temperature in arguments.temperature:
        settings = {"max_new_tokens": arguments.tokens, "eos_token_id": None, "temperature": temperature}
        texts = [[*prompt, *full.reference(prompt, **settings).token_ids] for prompt in prompts]
        chances = torch.cat(
            [
                acceptance(
                    *(logits_at_width(pipe.verifier, text, len(prompt), 1) for pipe in (full, quantized)), temperature
                )
                for prompt, text in zip(prompts, texts, strict=True)
            ]
        )
        rejection, coupled, bound = chances.mean(dim=0).tolist()
        print(f"| {temperature} | {rejection:.4f} | {coupled:.4f} | {bound:.4f} | {len(chances)} |")


def acceptance(full: Tensor, quantized: Tensor, temperature: float) -> Tensor:
    """``[n, 3]`` chances by rejection and by coupling, and the lower bound of the latter, from ``[n, V]`` logits."""
    sampling = Sampling(temperature=temperature)
    rows = []
    for target_probs, draft_probs in zip(sampling.probabilities(full), sampling.probabilities(quantized), strict=True):
        overlap = float(torch.minimum(target_probs, draft_probs).sum())
        coupled = coupled_acceptance(target_probs, draft_probs)
        rows.append([overlap, coupled, overlap / (2 - overlap)])
    return torch.tensor(rows, dtype=torch.float64)


def coupled_acceptance(target_probs: Tensor, draft_probs: Tensor) -> float:
    """The chance that both choose the same token with the same noise; ``[V]`` each."""
    likely = (torch.minimum(target_probs, draft_probs) > _NEGLIGIBLE).nonzero().flatten()
    total = 0.0
    for x in likely.tolist():
        ratio = torch.maximum(target_probs / target_probs[x], draft_probs / draft_probs[x])
        total += 1 / float(ratio.sum())
    return total


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantizer", default="w8a8")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
