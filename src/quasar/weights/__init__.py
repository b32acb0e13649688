"""Quantized weights: the record, the module that holds one, and what is done to models layer by layer."""
