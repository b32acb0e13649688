"""The quantizer ``w8a8``."""
