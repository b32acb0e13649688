"""The quantizer ``gguf``."""
