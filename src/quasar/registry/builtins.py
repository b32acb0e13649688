"""The strategies and commands that come with Quasar, registered like anybody else's."""

from __future__ import annotations

from collections.abc import Mapping

from quasar.registry.hookspecs import Factory, hookimpl

FUNCTION_DRAFTER: Factory = "quasar.drafters.function:FunctionDrafter"
"""What makes a drafter of a plain function."""


@hookimpl
def quasar_drafters() -> Mapping[str, Factory]:
    return {
        "model": "quasar.drafters.model:ModelDrafter",
        "nested": "quasar.drafters.nested:CascadeDrafter",
        "ngram": "quasar.drafters.ngram:NgramDrafter",
        "none": "quasar.drafters.none:EmptyDrafter",
    }


@hookimpl
def quasar_verifiers() -> Mapping[str, Factory]:
    return {"causal_lm": "quasar.verifiers.causal_lm:CausalLMVerifier"}


@hookimpl
def quasar_quantizers() -> Mapping[str, Factory]:
    return {
        "gguf": "quasar.quantizers.gguf.quantizer:GgufQuantizer",
        "hqq": "quasar.quantizers.hqq:HqqQuantizer",
        "w8a8": "quasar.quantizers.w8a8.quantizer:W8A8Quantizer",
        "none": "quasar.quantizers.none:NoQuantizer",
    }


@hookimpl
def quasar_checkpoints() -> Mapping[str, Factory]:
    return {"quasar": "quasar.checkpoints.own:OwnFormat"}


@hookimpl
def quasar_policies() -> Mapping[str, Factory]:
    return {
        "block": "quasar.policies.block:BlockPolicy",
        "coupled": "quasar.policies.coupled:CoupledPolicy",
        "greedy": "quasar.policies.greedy:GreedyPolicy",
        "margin": "quasar.policies.margin:MarginPolicy",
        "rejection": "quasar.policies.rejection:RejectionPolicy",
        "typical": "quasar.policies.typical:TypicalPolicy",
    }


@hookimpl
def quasar_kernels() -> Mapping[str, Factory]:
    return {
        "dense": "quasar.kernels.dense:DenseKernel",
        "reference": "quasar.kernels.reference:ReferenceKernel",
        "torch": "quasar.kernels.torch_int8:TorchInt8Kernel",
    }


@hookimpl
def quasar_commands() -> Mapping[str, Factory]:
    return {
        "generate": "quasar.commands.cli.generate:generate",
        "inspect": "quasar.commands.cli.inspect:inspect",
        "parity": "quasar.commands.cli.parity:parity",
        "plugins": "quasar.commands.cli.plugins:plugins",
        "quantize": "quasar.commands.cli.quantize:quantize",
    }
