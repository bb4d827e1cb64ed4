import pytest
import torch
import torch.nn.functional as F

from k2.train.loss import CHUNK_N, linear_cross_entropy, token_nll

C, V = 24, 97


def drawn(N):
    """States, head, targets and weights of which about a third are 0."""
    generator = torch.Generator().manual_seed(N)
    x, w = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator)
    weights = torch.rand(N, generator=generator)
    return x, w, torch.randint(0, V, (N,), generator=generator), weights * (weights > 1 / 3)


@pytest.mark.parametrize("N", [1, CHUNK_N, 2 * CHUNK_N + 37])
def test_equals_torch_on_the_full_logits(N):
    """Value and both gradients are those of cross_entropy on all logits at once, whether or not the chunks come out even."""
    x, w, targets, weights = drawn(N)
    x1, w1, x2, w2 = (t.clone().requires_grad_() for t in (x, w, x, w))
    loss = linear_cross_entropy(x1, w1, targets, weights)
    reference = (F.cross_entropy(x2 @ w2.T, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    (0.3 * loss).backward()  # an incoming gradient other than 1
    (0.3 * reference).backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w1.grad, w2.grad, rtol=1e-4, atol=1e-5)
    assert x1.grad is not None and not x1.grad[weights == 0].any()


def test_without_gradient_it_is_the_same_number():
    """Evaluation takes the way that keeps no gradient: equal value, token by token too."""
    x, w, targets, weights = drawn(CHUNK_N + 5)
    trained = linear_cross_entropy(x.clone().requires_grad_(), w, targets, weights)
    torch.testing.assert_close(linear_cross_entropy(x, w, targets, weights), trained.detach())
    torch.testing.assert_close(token_nll(x, w, targets), F.cross_entropy(x @ w.T, targets, reduction="none"))
