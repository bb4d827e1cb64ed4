import pytest
import torch
import torch.nn.functional as F

from k2.model.moe import MoE, Router, swiglu


def moe(config, seed=0):
    layer = MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.2, generator=generator)
        layer.gate.e_score_correction_bias.normal_(0, 0.1, generator=generator)
    return layer


def loop(layer, x):
    """The equations of section 1.2 one token and expert at a time."""
    gate, experts, rows = layer.gate, layer.experts, []
    for u in x:
        s = torch.sigmoid(gate.weight @ u)
        chosen = (s.detach() + gate.e_score_correction_bias).topk(gate.top_k).indices
        out = layer.shared_experts(u)
        for i in chosen:
            g = gate.scaling * s[i] / s[chosen].sum()
            a, b = (experts.gate_up_proj[i] @ u).chunk(2)
            out = out + g * (experts.down_proj[i] @ (F.silu(a) * b))
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_moe_is_a_loop_over_experts(top_k, make_config):
    """Grouped experts give what a plain loop gives, forward and in every gradient, also when experts see no token."""
    layer = moe(make_config(num_experts_per_tok=top_k))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found, expected = layer(x), loop(layer, x)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    inputs = [x, *layer.parameters()]
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    a = torch.autograd.grad((found * weight).sum(), inputs)
    b = torch.autograd.grad((expected * weight).sum(), inputs)
    for x_grad, y_grad in zip(a, b):
        torch.testing.assert_close(x_grad, y_grad, atol=1e-4, rtol=1e-3)


def test_swiglu_has_the_right_gradient():
    """gradcheck in float64, and the value is silu(gate) * up."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :3]) * x[:, 3:])
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_the_bias_selects_and_does_nothing_else(make_config):
    """A selection bias changes who is chosen; the combine weights of the chosen are their plain scores, normalised and scaled."""
    router = Router(make_config(num_experts_per_tok=3))
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
        router.e_score_correction_bias[2] = 10.0
        router.e_score_correction_bias[5] = -10.0
    weights, experts = router(x)
    assert (experts == 2).sum(1).eq(1).all() and not (experts == 5).any()
    scores = torch.sigmoid(x @ router.weight.T).gather(1, experts)
    torch.testing.assert_close(weights, router.scaling * scores / scores.sum(1, keepdim=True))
    torch.testing.assert_close(weights.sum(1), torch.full((50,), router.scaling))
    (grad,) = torch.autograd.grad(weights.square().sum(), router.weight)
    assert grad[5].abs().max() == 0 and grad[2].abs().max() > 0  # who is not chosen gets no gradient


def test_the_bias_update_follows_moonlights_rule(make_config):
    """b += u (sign(e) - mean sign(e)): overloaded experts go down, the others up, the mean stays; rate 0 changes nothing."""
    router = Router(make_config())
    router.load = torch.tensor([100, 10, 10, 10, 10, 10, 10, 10])
    router.update_bias(0.0)
    assert router.e_score_correction_bias.abs().max() == 0
    router.update_bias(1e-3)
    expected = 1e-3 * (torch.tensor([-1.0, 1, 1, 1, 1, 1, 1, 1]) - 0.75)
    torch.testing.assert_close(router.e_score_correction_bias, expected)


def test_bias_updates_balance_a_skewed_router(make_config):
    """Tokens with a common part overload few experts; updates bring max / mean load below 1.5, without a loss term."""
    router = Router(make_config())
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(0, 0.3, generator=g)
        x = torch.randn(4000, 64, generator=g) * 0.3 + torch.randn(64, generator=g)

        def violation() -> float:
            router.load = torch.zeros(8, dtype=torch.int64)
            router(x)
            return (router.load.max() / router.load.float().mean()).item()

        before = violation()
        for _ in range(400):
            violation()
            router.update_bias(5e-3)
        after = violation()
    assert before > 2.0 and after < 1.5, (before, after)
