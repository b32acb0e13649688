"""What this package adds to Quasar: a kernel and a verifier, both called ``native``."""

from __future__ import annotations

from quasar import hookimpl


@hookimpl
def quasar_kernels() -> dict[str, str]:
    return {"native": "quasar_native.kernel:NativeKernel"}


@hookimpl
def quasar_verifiers() -> dict[str, str]:
    return {"native": "quasar_native.verifier:NativeVerifier"}
