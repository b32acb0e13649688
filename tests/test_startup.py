"""What a program imports before it needs it: nothing that is slow, whatever is installed beside Quasar."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

SLOW = ("hqq", "torch._inductor.compile_fx", "matplotlib", "llguidance", "gguf", "networkx")
"""Packages, and parts of torch, that take long to import and that few programs use."""

needs_hqq = pytest.mark.skipif(find_spec("hqq") is None, reason="hqq is not installed")


def imported_by(code: str, *names: str) -> list[str]:
    """Which of the modules are imported after a program of these lines."""
    program = f"{code}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules], sep='\\n')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return run.stdout.split()


def test_a_pipeline_is_imported_without_what_few_programs_use():
    assert imported_by("import quasar; quasar.Pipeline", *SLOW) == []


@needs_hqq
def test_hqq_is_imported_when_it_is_used_and_works_as_it_does_alone():
    """By its own name, and by transformers' cache, which got a stand-in; nothing of the stand-in stays behind."""
    code = """
import quasar
from transformers import cache_utils
assert "hqq" not in sys.modules and "hqq.core.quantize" not in sys.modules
import torch
quantizer = cache_utils.HQQQuantizedLayer(nbits=4, axis_key=1, axis_value=1, q_group_size=16).quantizer
assert "hqq" not in sys.modules
keys = torch.linspace(-1, 1, 256).reshape(1, 1, 16, 16)
stored = quantizer.quantize(keys, nbits=4, axis=1, group_size=16, device="cpu", compute_dtype=torch.float32)
assert (quantizer.dequantize(*stored) - keys).abs().max() < 0.1
from hqq.core.quantize import HQQLinear, Quantizer
assert cache_utils.HQQQuantizer.quantize == Quantizer.quantize
assert HQQLinear.__module__ == "hqq.core.quantize" and isinstance(HQQLinear, type)
"""
    assert imported_by(f"import sys\n{code}", "hqq.core.quantize") == ["hqq.core.quantize"]


@needs_hqq
def test_hqq_imported_before_is_left_alone():
    code = """
import hqq.core.quantize as first
import quasar
from transformers import cache_utils
assert cache_utils.HQQQuantizer is first.Quantizer
"""
    assert imported_by(code, "hqq.core.quantize") == ["hqq.core.quantize"]
