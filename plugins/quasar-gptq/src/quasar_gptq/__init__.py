"""GPTQ for Quasar: the quantizer ``gptq``, and the format of checkpoints whose ``quant_method`` is ``gptq``."""

from collections.abc import Mapping

from quasar.registry.hookspecs import Factory, hookimpl


@hookimpl
def quasar_quantizers() -> Mapping[str, Factory]:
    return {"gptq": "quasar_gptq.quantizer:GptqQuantizer"}


@hookimpl
def quasar_checkpoints() -> Mapping[str, Factory]:
    return {"gptq": "quasar_gptq.checkpoint:GptqFormat"}
