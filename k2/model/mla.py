"""Multi-head latent attention (DeepSeek-V2, section 2.1), the naive form for training and the absorbed form for decoding side by
side.

Legend: B batch, T tokens, H heads, C = kv_lora_rank, N = qk_nope_head_dim, R = qk_rope_head_dim, D = N + R, V = v_head_dim,
S cached tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k2.config import ModelConfig
from k2.model import rope
from k2.model.attention import Packing, flash, max_logit
from k2.model.norm import RMSNorm

LATENT_NORM_EPS = 1e-6  # of the norms on the two latents, whatever rms_norm_eps is: DeepSeek's code and transformers fix it


class MLA(nn.Module):
    """Queries, keys and values from low-rank latents; only the key-value latent (C) and one shared rotary key (R) need be
    cached."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, H = config, config.num_attention_heads
        D = config.qk_nope_head_dim + config.qk_rope_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, H * D, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, H * D, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, H * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(H * config.v_head_dim, config.hidden_size, bias=False)
        self.scale = rope.softmax_scale(config)
        self.max_logit: Tensor | None = None  # (H,) running maximum over the micro-batches of a step, None: not collected
        self.exact_above = -torch.inf  # see attention.max_logit

    def queries(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H, N) and the rotated (B, T, H, R)."""
        config = self.config
        q = self.q_proj(x_BTC) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
        q_nope, q_rope = q.unflatten(-1, (config.num_attention_heads, -1)).split(
            [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        return q_nope, rope.rotate(q_rope, cos[..., None, :], sin[..., None, :])

    def latents(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What a cache holds: the normalised latent (B, T, C) and the rotated shared key (B, T, R)."""
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTC).split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rope.rotate(k_rope, cos, sin)

    def forward(
        self, x_BTC: Tensor, cos: Tensor, sin: Tensor, packing: Packing | None = None, cache: "Latents | None" = None
    ) -> Tensor:
        """Naive form: keys and values of all heads are spelled out. With `cache`, its first T slots are filled."""
        config = self.config
        q_nope, q_rope = self.queries(x_BTC, cos, sin)
        latent, k_rope = self.latents(x_BTC, cos, sin)
        if cache is not None:
            cache.latent[:, : latent.shape[1]], cache.k_rope[:, : latent.shape[1]] = latent, k_rope
        kv = self.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1))  # (B, T, H, N + V)
        k_nope, v = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope[..., None, :].expand(*k_nope.shape[:-1], -1)], dim=-1)
        if packing is None:
            out = self.attend(q, k, v)
        else:
            buckets = zip(packing.unpack(q), packing.unpack(k), packing.unpack(v), packing.masks(), strict=True)
            out = packing.repack([self.attend(*bucket) for bucket in buckets])
        return self.o_proj(out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """(B, T, H, D) and values (B, T, H, V) -> (B, T, H * V); keeps the heads' maximum logits if they are collected."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = flash(q, k, v, self.scale)
        if self.max_logit is not None:
            maxima = max_logit(q.detach(), k.detach(), lse.detach(), self.scale, real, self.exact_above)
            self.max_logit = torch.maximum(self.max_logit, maxima)
        return out.transpose(1, 2).flatten(2)

    def decode(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: "Latents", at_B: Tensor, visible_BS: Tensor) -> Tensor:
        """Absorbed form for one new token a row (T = 1): W_kc moves to the query and W_v behind the softmax, so that attention
        runs on the cached latents themselves. at_B: the slot of the new token; visible_BS: the slots it sees, itself included."""
        config, H = self.config, self.config.num_attention_heads
        q_nope, q_rope = self.queries(x_BTC, cos, sin)
        latent, k_rope = self.latents(x_BTC, cos, sin)
        row = torch.arange(len(at_B), device=at_B.device)
        cache.latent[row, at_B], cache.k_rope[row, at_B] = latent[:, 0], k_rope[:, 0]
        w_kc, w_v = self.kv_b_proj.weight.view(H, -1, config.kv_lora_rank).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        S = visible_BS.shape[1]
        c, r = cache.latent[:, :S], cache.k_rope[:, :S]
        q_absorbed = torch.einsum("bhn,hnc->bhc", q_nope[:, 0], w_kc)
        logits = (q_absorbed @ c.transpose(1, 2) + q_rope[:, 0] @ r.transpose(1, 2)).float() * self.scale  # (B, H, S)
        weights = logits.masked_fill(~visible_BS[:, None], float("-inf")).softmax(-1).to(c.dtype)
        out = torch.einsum("bhc,hvc->bhv", weights @ c, w_v)
        return self.o_proj(out.flatten(1)[:, None])


class Latents:
    """The cache of one layer: (B, S, C) latents and (B, S, R) rotary keys."""

    def __init__(self, config: ModelConfig, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.latent = torch.zeros(batch, slots, config.kv_lora_rank, dtype=dtype, device=device)
        self.k_rope = torch.zeros(batch, slots, config.qk_rope_head_dim, dtype=dtype, device=device)

    def select(self, rows: Tensor) -> "Latents":
        """A cache of these rows only, in this order."""
        new = object.__new__(Latents)
        new.latent, new.k_rope = self.latent[rows], self.k_rope[rows]
        return new

    def grow(self, slots: int) -> None:
        """More room, what is cached kept."""
        missing = slots - self.latent.shape[1]
        self.latent, self.k_rope = F.pad(self.latent, (0, 0, 0, missing)), F.pad(self.k_rope, (0, 0, 0, missing))
