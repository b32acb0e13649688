"""The plug-in AWQ: a quantizer, and a reader of checkpoints, both named ``awq``."""

from __future__ import annotations

from quasar import hookimpl


@hookimpl
def quasar_quantizers() -> dict[str, str]:
    return {"awq": "quasar_awq.quantizer:AwqQuantizer"}


@hookimpl
def quasar_checkpoints() -> dict[str, str]:
    return {"awq": "quasar_awq.checkpoint:AwqFormat"}
