"""What a program imports before it needs it: nothing that is slow, whatever is installed beside Quasar."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from quasar.commands import console
from quasar.timings import timed, timings

SLOW = ("transformers", "hqq", "torch._inductor.compile_fx", "matplotlib", "llguidance", "gguf", "networkx")
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


def test_a_stage_is_timed_without_the_stages_inside_it(monkeypatch):
    """So that the stages add up to the whole; nothing is kept where nobody asks."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with timings() as seconds, timed("outer"), timed("inner"):
        pass
    assert seconds == {"inner": 10, "outer": 20}
    with timed("outer"):
        pass
    assert seconds == {"inner": 10, "outer": 20}


@pytest.mark.real_model
def test_the_command_line_says_where_the_time_went(quasar_command):
    """On standard error, each stage once; the text stays alone on standard output."""
    status, out, err = quasar_command("generate", "Hi.", "-n", "2", "--timings", "--quantizer", "none")
    assert status == 0
    assert [line.split("  ")[0].strip() for line in err.splitlines() if line.endswith(" s")] == [
        *("import", "load", "prepare", "prefill", "first token", "decode"),
    ]
    assert "prefill" not in out


def test_whoever_waited_long_is_told_how_not_to(monkeypatch, capsys):
    """On a terminal, and only where quantizing was what took long."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    console.offer_to_save("smollm2", {"load": 2.0, "quantize": 6.0})
    assert "took 8 s; once is enough: quasar quantize --model smollm2 --out FOLDER" in capsys.readouterr().err
    for seconds in ({"load": 9.0, "quantize": 0.0}, {"load": 1.0, "quantize": 1.0}, {}):
        console.offer_to_save("smollm2", seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    console.offer_to_save("smollm2", {"load": 2.0, "quantize": 6.0})
    assert capsys.readouterr().err == ""
