"""Quantizers: how weights are mapped. How they are executed is a kernel's business."""
