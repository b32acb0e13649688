"""Quasar: speculative decoding with quantized verification, whose output is exactly what it says it is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quasar.later import import_hqq_later
from quasar.registry.hookspecs import hookimpl
from quasar.types import Chunk, Draft, GenerationResult, Quantized, Verdict, Verification

if TYPE_CHECKING:
    from quasar.pipeline.pipeline import Pipeline

__version__ = "0.2.0"
__all__ = ["Chunk", "Draft", "GenerationResult", "Pipeline", "Quantized", "Verdict", "Verification", "hookimpl"]

import_hqq_later()


def __getattr__(name: str) -> Any:
    if name == "Pipeline":  # imports torch, which plug-ins and `quasar --help` should not wait for
        return import_module("quasar.pipeline.pipeline").Pipeline
    raise AttributeError(f"module 'quasar' has no attribute {name!r}")
