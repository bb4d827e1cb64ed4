"""Mixture of experts: sigmoid router with a selection bias, grouped experts, shared expert (DeepSeek-V3 section 2.1.2, K2 section
2.3).

Legend: N tokens, E experts, K experts a token, C = hidden_size, F = moe_intermediate_size.
"""

# pyright: reportPrivateImportUsage=false
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k2.config import ModelConfig


class MLP(nn.Module):
    """SwiGLU; gate and up lie in one matrix, in this order, as in the experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


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


class Dispatch(torch.autograd.Function):
    """Copy each token to its K places in expert order. Backward sums them by a gather, so it needs no atomics and is
    deterministic."""

    @staticmethod
    def forward(ctx, x_NC: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x_NC[order // top_k]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """Weighted sum of a token's K expert outputs, read back from expert order."""

    @staticmethod
    def forward(ctx, y_MC: Tensor, weights_NK: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y_MC, weights_NK, order, inverse)
        y_NKC = y_MC[inverse].unflatten(0, weights_NK.shape)
        return torch.bmm(weights_NK[:, None].to(y_MC.dtype), y_NKC).squeeze(1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y_MC, weights_NK, order, inverse = ctx.saved_tensors
        grad_y = grad[order // weights_NK.shape[1]] * weights_NK.flatten()[order, None].to(grad.dtype)
        grad_w = torch.bmm(y_MC[inverse].unflatten(0, weights_NK.shape), grad[:, :, None]).squeeze(2)
        return grad_y, grad_w.to(weights_NK.dtype), None, None


class Experts(nn.Module):
    """All routed experts as two stacked weights: (E, 2F, C) and (E, C, F)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, C, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, width))

    def forward(self, x_NC: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        E, K = len(self.gate_up_proj), experts_NK.shape[1]
        flat = experts_NK.flatten()
        order = flat.argsort(stable=True)  # (N K,) in expert order
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        offsets = torch.bincount(flat, minlength=E).cumsum(0).to(torch.int32)
        x = Dispatch.apply(x_NC, order, inverse, K)
        h = swiglu(torch._grouped_mm(x, self.gate_up_proj.transpose(1, 2), offsets))
        y = torch._grouped_mm(h, self.down_proj.transpose(1, 2), offsets)
        return Combine.apply(y, weights_NK, order, inverse)  # type: ignore[return-value]


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
