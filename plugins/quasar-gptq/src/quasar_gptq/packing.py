"""Small integers in 32-bit words, as GPTQ checkpoints pack them."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def unpack(words: Tensor, bits: int) -> Tensor:
    """Take words apart: integers follow each other without a gap, lowest bits first, also across words (3 bits).

    Args:
        words: ``[n, m]`` int32; the integers run down the columns.
        bits: Of an integer, 2 to 8.

    Returns:
        ``[⌊32n / bits⌋, m]`` uint8.
    """
    n = words.shape[0]
    padded = torch.nn.functional.pad(words, (0, 0, 0, -n % bits))
    padded = padded.reshape(-1, bits, words.shape[1])  # 32 integers each
    integers = torch.empty((padded.shape[0], WORD, words.shape[1]), dtype=torch.uint8, device=words.device)
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        integer = padded[:, word] >> shift
        if (kept := WORD - shift) < bits:
            integer = integer & (2**kept - 1) | padded[:, word + 1] << kept
        integers[:, i] = integer & (2**bits - 1)
    return integers.flatten(0, 1)[: n * WORD // bits]
