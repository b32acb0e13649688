"""Choosing tokens wakes no threads of torch, which would spin in the way of a compiled verifier's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os
import numpy as np
import torch
from quasar.loop.penalties import MinNewTokens, NoRepeatNgram, RepetitionPenalty
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.pipeline.generation import logprobs_of
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.margin import MarginPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.types import Draft, Emission, Step, Verification

torch.set_num_threads(3)
threads = lambda: len(os.listdir("/proc/self/task"))
generator = np.random.default_rng(0)
raw = Verification(torch.from_numpy(generator.standard_normal((3, 60000)).astype(np.float32)))
probs = torch.from_numpy(np.full((2, 60000), 1 / 60000))
before = threads()
for cuts in ({}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1}):
    for temperature in (0.0, 0.7):
        sampling = Sampling(temperature=temperature, **cuts)
        for policy in (CoupledPolicy(), RejectionPolicy(), BlockPolicy(), MarginPolicy(), TypicalPolicy()):
            for draft in (Draft([3, 4]), Draft([3, 4], probs)):
                processors = [RepetitionPenalty(1.2), NoRepeatNgram(3), MinNewTokens(3, 9, [2])]
                for verification in (raw, Processing([5, 6, 5], processors).apply(raw, draft)):
                    verdict = policy.decide(draft, verification, sampling)
                    list(logprobs_of(Step(Emission(verdict.committed(draft)), verification), 5))
after = threads()
raw.logits.exp()
print(json.dumps([before, after, threads()]))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads where Linux lists them")
def test_choosing_tokens_starts_no_threads_of_torch():
    """With every policy, every cut, the built-in processors and log-probabilities; one operation of torch does."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, with_torch = json.loads(done.stdout)
    assert before == after < with_torch
