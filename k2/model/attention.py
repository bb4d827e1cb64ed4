"""Causal attention that also returns each head's maximum logit, exactly and without a T x T tensor.

The kernels return the log-sum-exp of each query row, and max <= lse <= max + ln(keys). So the rows with the largest lse are looked
at first; as soon as their true maximum is above every other row's lse, it is the head's maximum. Only where that certificate fails
are all rows looked at. Legend: B batch, H heads, T tokens, D = qk_head_dim, V = v_head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_T = 256  # rows of scores in flight; their tile fits the cache


@dataclass(frozen=True)
class Packing:
    """Several sequences laid end to end in one row of N tokens; attention unpacks them, everything else runs on the N tokens.

    Sequences of like length share a bucket, a padded (n, L) grid; P is the places of all buckets.
    shapes: (n, L) of each bucket; index: (P,) the token at a place, 0 where it pads; real: (P,) whether it does not;
    inverse: (N,) the place of a token; positions: (N,) position of a token in its own sequence.
    """

    shapes: tuple[tuple[int, int], ...]
    index: Tensor
    real: Tensor
    inverse: Tensor
    positions: Tensor

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> "Packing":
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        bucket = (size - 1).clamp(min=1).log2().div(0.5).floor().clamp(min=8)  # a factor of sqrt(2) apart, all below 16 in one
        shapes, index, real = [], [], []
        for b in bucket.unique():
            rows = (bucket == b).nonzero().squeeze(1)
            column = torch.arange(int(size[rows].max()))
            real.append((column < size[rows, None]).flatten())
            index.append((start[rows, None] + column).flatten().where(real[-1], 0))
            shapes.append((len(rows), len(column)))
        where, is_real = torch.cat(index), torch.cat(real)
        inverse = torch.empty(int(size.sum()), dtype=torch.int64)
        inverse[where[is_real]] = is_real.nonzero().squeeze(1)
        positions = torch.arange(len(inverse)) - start.repeat_interleave(size)
        return Packing(tuple(shapes), where, is_real, inverse, positions).to(device)

    def to(self, device: torch.device | str) -> "Packing":
        tensors = (t.to(device) for t in (self.index, self.real, self.inverse, self.positions))
        return Packing(self.shapes, *tensors)

    def unpack(self, x: Tensor) -> list[Tensor]:
        """(1, N, ...) -> a (n, L, ...) for each bucket."""
        places = Unpack.apply(x[0], self.index, self.inverse)
        parts = places.split([n * length for n, length in self.shapes])  # type: ignore[union-attr]
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def repack(self, parts: list[Tensor]) -> Tensor:
        """The way back, (1, N, ...)."""
        flat = torch.cat([p.flatten(0, 1) for p in parts])
        return Repack.apply(flat, self.index, self.real, self.inverse)[None]  # type: ignore[index]

    def masks(self) -> list[Tensor]:
        """(n, L) for each bucket: which places are not padding."""
        parts = self.real.split([n * length for n, length in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Unpack(torch.autograd.Function):
    """Tokens to places. Nothing reads the padding, so backward is a gather too."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Repack(torch.autograd.Function):
    """Places to tokens; padding gets no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, real: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index, real)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        index, real = ctx.saved_tensors
        return grad.index_select(0, index).masked_fill_(~real.view(-1, *[1] * (grad.ndim - 1)), 0), None, None, None


def flash(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention: output (B, H, T, V) and the log-sum-exp of the scaled logits (B, H, T), float32. Differentiable in the
    output."""
    if q_BHTD.device.type == "cpu":  # the CPU kernel wants one head size
        missing = q_BHTD.shape[-1] - v_BHTV.shape[-1]
        if missing < 0:
            q_BHTD, k_BHTD = F.pad(q_BHTD, (0, -missing)), F.pad(k_BHTD, (0, -missing))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTD, k_BHTD, F.pad(v_BHTV, (0, max(missing, 0))), 0.0, True, scale=scale
        )
        return out[..., : v_BHTV.shape[-1]], lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BHTD, k_BHTD, v_BHTV, None, True, 0.0, True, scale=scale
    )
    return out, lse[..., : q_BHTD.shape[2]]


@torch.no_grad()
def max_logit(
    q_BHTD: Tensor, k_BHTD: Tensor, lse_BHT: Tensor, scale: float, real_BT: Tensor | None = None, exact_above: float = -math.inf
) -> Tensor:
    """(H,) the signed maximum of scale * q_i . k_j over j <= i and over the batch, float32. `real_BT` marks rows that are not
    padding.

    Exact wherever it may lie above `exact_above` (QK-Clip's tau); below that, a head without a certificate reports the best row
    looked at.
    """
    B, H, T, _ = q_BHTD.shape
    if real_BT is not None:
        lse_BHT = lse_BHT.masked_fill(~real_BT[:, None], -math.inf)
    looked_at = min(T, max(8, min(T // 64, 64)))  # bounded, so that memory stays linear in T
    top, row = lse_BHT.topk(min(T, looked_at + 1), dim=-1)
    row_BHr = row[..., :looked_at]
    q_BHrD = q_BHTD.gather(2, row_BHr[..., None].expand(-1, -1, -1, q_BHTD.shape[-1]))
    scores = (q_BHrD @ k_BHTD.transpose(2, 3)).float()  # (B, H, r, T)
    hidden = torch.arange(T, device=scores.device) > row_BHr[..., None]
    if real_BT is not None:  # rows that only pad a short sequence may have been picked for want of others
        hidden |= ~real_BT[:, None].expand(-1, H, -1).gather(2, row_BHr)[..., None]
    best_H = scores.masked_fill_(hidden, -math.inf).amax(dim=(0, 2, 3)) * scale
    if looked_at == T:
        return best_H
    unseen_BH = top[..., -1] + 1e-3 * best_H.abs() + 1e-3  # bound on every row not looked at, with room for rounding
    doubt_BH = (unseen_BH > best_H) & (unseen_BH > exact_above)
    for b, h in doubt_BH.nonzero().tolist():
        best_H[h] = torch.maximum(best_H[h], _all_rows(q_BHTD[b, h], k_BHTD[b, h], None if real_BT is None else real_BT[b]) * scale)
    return best_H


def _all_rows(q_TD: Tensor, k_TD: Tensor, real_T: Tensor | None) -> Tensor:
    T, best = len(q_TD), torch.full((), -math.inf, device=q_TD.device)
    for start in range(0, T, BLOCK_T):
        stop = min(start + BLOCK_T, T)
        scores = (q_TD[start:stop] @ k_TD[:stop].T).float()
        rows = torch.arange(start, stop, device=scores.device)
        hidden = torch.arange(stop, device=scores.device) > rows[:, None]
        if real_T is not None:
            hidden |= ~real_T[start:stop, None]
        best = torch.maximum(best, scores.masked_fill_(hidden, -math.inf).amax())
    return best
