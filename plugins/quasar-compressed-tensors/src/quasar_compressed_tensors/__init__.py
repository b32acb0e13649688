"""Checkpoints of llm-compressor, in the format of the library compressed-tensors, as a plug-in of Quasar."""

from quasar import hookimpl


@hookimpl
def quasar_checkpoints() -> dict[str, str]:
    return {"compressed-tensors": "quasar_compressed_tensors.checkpoint:CompressedTensorsCheckpoint"}
