"""Rotary positions with YaRN (arXiv 2309.00071), in DeepSeek-V3's form: interleaved pairs, temperature in the softmax scale.

Legend: B batch, T tokens, H heads, R = qk_rope_head_dim.
"""

import math

import torch
from torch import Tensor

from k2.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """(R/2,) radians per token. With YaRN, slow frequencies (fewer than beta_slow rotations over the pre-training context) are
    divided by `factor`, fast ones (above beta_fast) kept, and a linear ramp lies between. K2 sets both betas to 1: in effect a
    hard split."""
    dim, base, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    inv_freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return inv_freq

    def pair_with(rotations: float) -> float:
        """The (fractional) pair that turns this often over the original context."""
        return dim * math.log(config.max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: ModelConfig) -> float:
    """1/sqrt(qk_head_dim), times YaRN's temperature squared: 1.8133 for K2's factor 32."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.yarn and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def rotary_scale(config: ModelConfig) -> float:
    """Factor on cos and sin: 1 when mscale = mscale_all_dim, as in K2."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def rotation(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (..., R/2), for integer positions of any shape (...)."""
    angle = positions[..., None].float() * inv_freq
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn interleaved pairs. x: (..., R); cos, sin: broadcastable to (..., R/2). The result is de-interleaved, [first halves,
    second halves]: the same permutation on queries and keys, so dot products are unchanged."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
