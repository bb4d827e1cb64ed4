"""Newton-Schulz orthogonalisation of a batch of matrices (Moonlight, arXiv 2502.16982, section 2.1)."""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def newton_schulz(g: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """(..., n, m) -> about U V^T of each matrix, singular values within about [0.7, 1.2] (less for tiny ones), in g's dtype.

    Runs on the short side: hand over matrices with n <= m to save a copy.
    """
    x = g.mT if g.shape[-2] > g.shape[-1] else g
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + eps)
    flat = x.flatten(0, -3) if x.ndim > 3 else x if x.ndim == 3 else x[None]
    for _ in range(steps):
        gram = flat @ flat.mT
        gram = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)  # b G + c G G
        flat = torch.baddbmm(flat, gram, flat, beta=A)
    x = flat.view(x.shape)
    return x.mT if g.shape[-2] > g.shape[-1] else x
