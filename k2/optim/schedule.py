"""Warmup-stable-decay (K2 report, section 2.5): a pure function of the tokens seen."""

import math

from k2.config import OptimConfig


def wsd(tokens: float, total: float, optim: OptimConfig) -> float:
    """Learning rate after `tokens` of `total`: linear warm-up, constant, cosine to final_lr over the last decay_fraction."""
    if tokens < optim.warmup_tokens:
        return optim.lr * tokens / optim.warmup_tokens
    decay = optim.decay_fraction * total
    progress = 0.0 if decay == 0 else min(1.0, max(0.0, (tokens - (total - decay)) / decay))
    return optim.final_lr + (optim.lr - optim.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
