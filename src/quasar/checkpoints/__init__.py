"""Quantized models in files: others' formats are read, Quasar's own is written too."""
