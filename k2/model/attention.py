"""Causal attention that also returns each head's maximum logit, exactly and without a T x T tensor.

The kernels return the log-sum-exp of each query row, and max <= lse <= max + ln(keys). So the rows with the largest lse are looked at first;
as soon as their true maximum is above every other row's lse, it is the head's maximum. Only where that certificate fails are all rows
looked at. Legend: B batch, H heads, T tokens, D = qk_head_dim, V = v_head_dim.
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

    index: (n, L) where each sequence's tokens lie, padding points at token 0; inverse: (N,) where a token lies in the flattened (n, L);
    positions: (N,) position of a token in its own sequence.
    """

    index: Tensor
    inverse: Tensor
    positions: Tensor

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> "Packing":
        longest = max(lengths)
        size = torch.tensor(lengths)
        start = size.cumsum(0) - size
        column = torch.arange(longest)
        real = column < size[:, None]  # (n, L)
        index = torch.where(real, start[:, None] + column, 0)
        positions = column.expand_as(real)[real]
        return Packing(index, real.flatten().nonzero().squeeze(1), positions).to(device)

    def to(self, device: torch.device | str) -> "Packing":
        return Packing(self.index.to(device), self.inverse.to(device), self.positions.to(device))


def flash(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention: output (B, H, T, V) and the log-sum-exp of the scaled logits (B, H, T), float32. Differentiable in the output."""
    if q_BHTD.device.type == "cpu":  # the CPU kernel wants one head size
        missing = q_BHTD.shape[-1] - v_BHTV.shape[-1]
        if missing < 0:
            q_BHTD, k_BHTD = F.pad(q_BHTD, (0, -missing)), F.pad(k_BHTD, (0, -missing))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTD, k_BHTD, F.pad(v_BHTV, (0, max(missing, 0))), 0.0, True, scale=scale
        )
        return out[..., : v_BHTV.shape[-1]], lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q_BHTD, k_BHTD, v_BHTV, None, True, 0.0, True, scale=scale)
    return out, lse[..., : q_BHTD.shape[2]]


@torch.no_grad()
def max_logit(
    q_BHTD: Tensor, k_BHTD: Tensor, lse_BHT: Tensor, scale: float, real_BT: Tensor | None = None, exact_above: float = -math.inf
) -> Tensor:
    """(H,) the signed maximum of scale * q_i . k_j over j <= i and over the batch, float32. `real_BT` marks rows that are not padding.

    Exact wherever it may lie above `exact_above` (QK-Clip's tau); below that, a head without a certificate reports the best row looked at.
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
