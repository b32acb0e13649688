"""Compiled kernels and a compiled forward for Quasar: see :mod:`quasar_native.plugin`."""
