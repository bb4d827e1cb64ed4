"""Mixture of experts: sigmoid router with a selection bias, grouped experts, shared expert (DeepSeek-V3 section 2.1.2, K2 section
2.3).

Legend: N tokens, E experts, K experts a token, C = hidden_size, F = moe_intermediate_size.
"""

# pyright: reportPrivateImportUsage=false
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k2.config import ModelConfig


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up; keeps gate and up alone, in one tensor (..., 2F)."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(grad, gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    return SwiGLU.apply(gate_up)  # type: ignore[return-value]


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return out


class MLP(nn.Module):
    """SwiGLU; gate and up lie in one matrix, in this order, as in the experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Router(nn.Module):
    """Top-k by sigmoid score plus bias; the combine weights use the score alone, normalised and scaled. In float32 whatever the
    model's dtype."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.load: Tensor | None = None  # (E,) tokens sent to each expert over the micro-batches of a step, None: not collected

    def forward(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(N, K) combine weights, float32, and expert indices."""
        scores_NE = F.linear(x_NC.float(), self.weight.float()).sigmoid()
        experts_NK = (scores_NE.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights_NK = scores_NE.gather(1, experts_NK)
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20) * self.scaling
        if self.load is not None:
            self.load += torch.bincount(experts_NK.flatten(), minlength=len(self.load))
        return weights_NK, experts_NK

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Moonlight's rule (arXiv 2502.16982, appendix C): b += u (sign(e) - mean sign(e)), e = mean load - load: overloaded
        experts go down."""
        if rate and self.load is not None:
            sign = torch.sign(self.load.float().mean() - self.load)
            self.e_score_correction_bias += rate * (sign - sign.mean())


class RoutedExperts(torch.autograd.Function):
    """Each token through its K experts and the weighted sum of what they say.

    The combine weight goes on the hidden units, before the down-projection: W_down (w h) = w (W_down h). So the experts' outputs
    are not needed in backward, and neither are the K copies of the input or the hidden units: both are made again from x and
    gate_up. Copies and sums are gathers both ways: no atomics, so the result is deterministic.
    Legend: M = N K rows in expert order; `order` (M,) the place of a row among the tokens' choices, `inverse` the way back.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x_NC: Tensor, weights_NK: Tensor, gate_up: Tensor, down: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor
    ) -> Tensor:
        gate_up_M = torch._grouped_mm(_rows(x_NC, order, inverse), gate_up.mT, offsets)
        gate, up = gate_up_M.chunk(2, dim=-1)
        hidden_M = F.silu(gate).mul_(up).mul_(_in_order(weights_NK, order, x_NC.dtype))
        out_MC = torch._grouped_mm(hidden_M, down.mT, offsets)
        ctx.save_for_backward(x_NC, weights_NK, gate_up, down, order, inverse, offsets, gate_up_M)
        return _sum_choices(out_MC, inverse, weights_NK.shape[1])

    @staticmethod
    def backward(ctx, grad_NC: Tensor):  # type: ignore[override]
        x_NC, weights_NK, gate_up, down, order, inverse, offsets, gate_up_M = ctx.saved_tensors
        K = weights_NK.shape[1]
        gate, up = gate_up_M.chunk(2, dim=-1)
        hidden_M, weight_M1 = F.silu(gate).mul_(up), _in_order(weights_NK, order, x_NC.dtype)
        grad_MC = _rows(grad_NC.contiguous(), order, inverse)
        grad_hidden_M = torch._grouped_mm(grad_MC, down, offsets)
        grad_weight_M = (grad_hidden_M * hidden_M).sum(-1, dtype=weights_NK.dtype)
        grad_down = torch._grouped_mm(grad_MC.mT, hidden_M.mul_(weight_M1), offsets)
        grad_gate_up_M = swiglu_backward(grad_hidden_M.mul_(weight_M1), gate_up_M)
        grad_gate_up = torch._grouped_mm(grad_gate_up_M.mT, _rows(x_NC, order, inverse), offsets)
        grad_x = _sum_choices(torch._grouped_mm(grad_gate_up_M, gate_up, offsets), inverse, K)
        grad_weights = grad_weight_M.index_select(0, inverse).view_as(weights_NK)
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None


def _rows(x_NC: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """(M, C): each token's row at its K places in expert order."""
    return x_NC.index_select(0, order // (len(inverse) // len(x_NC)))


def _in_order(weights_NK: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    return weights_NK.flatten().index_select(0, order).to(dtype)[:, None]


def _sum_choices(y_MC: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    return y_MC.index_select(0, inverse).unflatten(0, (-1, top_k)).sum(1)


class Experts(nn.Module):
    """All routed experts as two stacked weights: (E, 2F, C) and (E, C, F)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, C, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, width))

    def forward(self, x_NC: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        flat = experts_NK.flatten()
        order = flat.argsort(stable=True)  # (M,) in expert order
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        offsets = torch.bincount(flat, minlength=len(self.gate_up_proj)).cumsum(0).to(torch.int32)
        weights = (self.gate_up_proj, self.down_proj)
        return RoutedExperts.apply(x_NC, weights_NK, *weights, order, inverse, offsets)  # type: ignore[return-value]


class MoE(nn.Module):
    """The sum of the chosen routed experts and the shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = (
            MLP(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size) if config.n_shared_experts else None
        )

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.flatten(0, -2)
        y = self.experts(x_NC, *self.gate(x_NC)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
