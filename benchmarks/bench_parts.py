"""Parts by themselves, with pytest-benchmark: ``pytest benchmarks/bench_parts.py``."""

from __future__ import annotations

import pytest
import torch

from quasar.drafters.ngram import NgramDrafter
from quasar.kernels.reference import ReferenceKernel
from quasar.kernels.torch_int8 import TorchInt8Kernel
from quasar.loop.decode import speculate
from quasar.loop.decoding import Decoding
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.policies.coupled import CoupledPolicy
from quasar.types import Draft, Verification
from quasar.weights.products import product_in_panels
from quasar.weights.record import QuantizedWeight, quantize_symmetric


@pytest.mark.parametrize("context", [100, 10_000, 100_000])
def bench_ngram_step(benchmark, context):
    """One propose and one commit; must not grow with the context."""
    session = NgramDrafter().start([i * 7919 % 1000 for i in range(context)], Sampling(), None)

    def step():
        session.propose(5)
        session.commit([1], None)

    benchmark(step)


@pytest.mark.parametrize("width", [1, 6, 16])
@pytest.mark.parametrize("kernel", [TorchInt8Kernel(), TorchInt8Kernel(split=True), ReferenceKernel()])
def bench_linear(benchmark, kernel, width):
    """One 1536 × 576 layer (SmolLM2's up projection)."""
    values, scales = quantize_symmetric(torch.randn(1536, 576, generator=torch.Generator().manual_seed(0)))
    executor = kernel.prepare(QuantizedWeight(values, scales, activations="int8_per_token"))
    inputs = torch.randn(1, width, 576)
    benchmark(executor, inputs)


@pytest.mark.parametrize("rows", [1, 4, 6, 16])
@pytest.mark.parametrize("product", [torch.nn.functional.linear, product_in_panels])
def bench_a_product_of_few_rows(benchmark, product, rows):
    """SmolLM2's output head in float32: as a linear layer computes it, and in blocks with the weight first."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(49152, 576, generator=generator), torch.randn(rows, 576, generator=generator)
    benchmark(product, inputs, weight)


class Instant:
    """A verifier that takes no time, so that what is left is the loop."""

    vocab_size, max_length, invariance = 4, None, "bitwise"

    def start(self, prompt_ids, needs=frozenset()):
        return self

    def verify(self, draft: Draft) -> Verification:
        return Verification(torch.eye(4)[[0] * (len(draft) + 1)])

    def commit(self, token_ids):
        pass


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def bench_loop_of_a_hundred_steps(benchmark, sampling):
    """Everything but drafting and verifying."""

    def run():
        stops = Stopping(600)
        parts = {"drafter": NgramDrafter(), "verifier": Instant(), "policy": CoupledPolicy()}
        how = {"sampling": sampling, "processing": Processing([0]), "stopping": stops, "stats": DecodeStats()}
        for _ in speculate(Decoding([0], **parts, **how)):
            pass

    benchmark(run)
