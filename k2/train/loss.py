"""Cross-entropy of the head without the (tokens, vocabulary) tensor: chunk by chunk, with the gradient taken in the forward pass.

Memory is linear in the tokens whatever the vocabulary. Legend: N tokens, C = hidden_size, V = vocab_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_N = 512  # rows of logits in flight


class LinearCrossEntropy(torch.autograd.Function):
    """sum_t weights_t * -log softmax(x_t W^T)[targets_t], float32 scalar; gradients for x and W."""

    @staticmethod
    def forward(ctx, x_NC: Tensor, w_VC: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:  # type: ignore[override]
        total = torch.zeros((), device=x_NC.device)
        grad_x, grad_w = torch.empty_like(x_NC), torch.zeros_like(w_VC, dtype=torch.float32)
        tile = (min(CHUNK_N, len(x_NC)), len(w_VC))  # three, used again by each chunk: fresh memory costs a quarter of the time
        low, logits, log_p = (x_NC.new_empty(tile, dtype=dtype) for dtype in (x_NC.dtype, torch.float32, torch.float32))
        for x, target, weight, gx in zip(*(t.split(CHUNK_N) for t in (x_NC, targets_N, weights_N, grad_x)), strict=True):
            low, logits, log_p = low[: len(x)], logits[: len(x)], log_p[: len(x)]
            logits.copy_(torch.mm(x, w_VC.T, out=low))
            torch.log_softmax(logits, dim=-1, out=log_p)
            total -= (log_p.gather(1, target[:, None]).squeeze(1) * weight).sum()
            grad = log_p.exp_().mul_(weight[:, None])
            grad.scatter_add_(1, target[:, None], -weight[:, None])
            grad = low.copy_(grad)
            torch.mm(grad, w_VC, out=gx)
            grad_w += grad.T @ x
        ctx.save_for_backward(grad_x, grad_w.to(w_VC.dtype))
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_w * grad.to(grad_w.dtype), None, None


def linear_cross_entropy(x_NC: Tensor, w_VC: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted sum of negative log-likelihoods, in nats."""
    if torch.is_grad_enabled() and (x_NC.requires_grad or w_VC.requires_grad):
        return LinearCrossEntropy.apply(x_NC, w_VC, targets_N, weights_N)  # type: ignore[return-value]
    return (token_nll(x_NC, w_VC, targets_N) * weights_N).sum()


@torch.no_grad()
def token_nll(x_NC: Tensor, w_VC: Tensor, targets_N: Tensor) -> Tensor:
    """(N,) negative log-likelihood of each target, nats, float32, without gradient."""
    parts = zip(x_NC.split(CHUNK_N), targets_N.split(CHUNK_N), strict=True)
    return torch.cat([F.cross_entropy((x @ w_VC.T).float(), target, reduction="none") for x, target in parts])
