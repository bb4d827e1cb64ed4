"""Bits per byte on the validation split: the loss that compares models of different tokenizers."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from k2.data.shards import TokenRows


@torch.inference_mode()
def bits_per_byte(model: torch.nn.Module, validation: TokenRows, tokens: int, batch_rows: int = 4) -> float:
    """Total nats of the targets over their total UTF-8 bytes and ln 2, on the first `tokens` validation tokens (at least a row).

    Special tokens among the targets have a loss and no bytes: marking where a document ends is part of the price of the text.
    """
    device = next(model.parameters()).device
    count = min(validation.rows, max(1, tokens // (validation.row_tokens - 1)))
    nats, size = 0.0, 0
    for first in range(0, count, batch_rows):
        indices = np.arange(first, min(first + batch_rows, count))
        rows = validation.read(indices).to(device)  # (B, T+1)
        logits = model(rows[:, :-1])  # (B, T, V)
        nats += F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
        size += int(validation.bytes(indices).sum())
    return nats / size / math.log(2)
