"""How long a program takes to start: whole processes, each started anew, by the way the model comes.

    python benchmarks/startup.py [--repeats 3]

Prints the median of each way, and of what every one of them has to import, with the versions and threads beside.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

TORCH = "import torch, transformers.modeling_utils"
LIBRARIES = f"import quasar; {TORCH}"  # quasar keeps hqq out of it
PLAIN = """
import sys, torch, transformers
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
"""
OURS = "import sys; from quasar.checkpoints.models import load_model; load_model(sys.argv[1])"


def seconds_of(command: list[str]) -> float:
    """Wall time of one process, which must succeed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - started


def generate(model: str) -> list[str]:
    """A command that answers with 8 tokens."""
    return [sys.executable, "-m", "quasar", "generate", "--model", model, "--max-new-tokens", "8", "Say hi."]


def save_full(folder: Path) -> str:
    """The demo model in full precision, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quasar.checkpoints.models import load_model

    loaded = load_model("smollm2")
    settings = {key: value for key, value in loaded.model.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**settings))  # the one that is loaded knows that it comes from a .gguf file
    model.load_state_dict(loaded.model.state_dict())
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def ways(folder: Path) -> dict[str, list[str]]:
    """What is measured, by name."""
    saved, full = str(folder / "saved"), save_full(folder / "full")
    quantize = [sys.executable, "-m", "quasar", "quantize", "--model", "smollm2", "--out", saved]
    subprocess.run(quantize, check=True, capture_output=True)
    python = [sys.executable, "-c"]
    return {
        "import torch and transformers": [*python, TORCH],
        "the same after import quasar": [*python, LIBRARIES],
        "import quasar; quasar.Pipeline": [*python, "import quasar; quasar.Pipeline"],
        "generate, saved quantized model": generate(saved),
        "generate, demo GGUF": generate("smollm2"),
        "load an unquantized folder, transformers": [*python, PLAIN, full],
        "load an unquantized folder, quasar": [*python, OURS, full],
    }


def main() -> None:
    """Measure, one way after the other in turns, so that a busy machine is busy for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        commands = ways(Path(folder))
        measured: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                measured[name].append(seconds_of(command))
    packages = ("torch", "transformers", "quasar-decode", "quasar-native", "hqq", "gguf")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if _is_installed(name)]
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{', '.join(versions)}; Python {platform.python_version()}, {machine}")
    for name, seconds in measured.items():
        print(f"{name:42} {statistics.median(seconds):6.2f} s  (least {min(seconds):.2f})")


def _is_installed(package: str) -> bool:
    return find_spec(package.replace("quasar-decode", "quasar").replace("-", "_")) is not None


if __name__ == "__main__":
    main()
