import pytest
import torch

from k2.config import YarnConfig
from k2.model.attention import Packing
from k2.model.mla import Latents

YARN = YarnConfig(factor=4.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
SHAPES = {"q_lora": {}, "no_q_lora": {"q_lora_rank": None}, "yarn": {"yarn": YARN}, "wide_values": {"v_head_dim": 40}}


@pytest.mark.parametrize("shape", SHAPES)
def test_causality(shape, make_model, tokens):
    """A token's logits do not change with what comes after it, and do change with what comes before."""
    model, a = make_model(**SHAPES[shape]), tokens(1, 48)
    b = a.clone()
    b[:, 30:] = tokens(1, 18, seed=1)
    with torch.no_grad():
        before, after = model(a), model(b)
        torch.testing.assert_close(before[:, :30], after[:, :30], atol=1e-6, rtol=0)
        assert (before[:, 30:] - after[:, 30:]).abs().amax(-1).min() > 1e-3
        b = a.clone()
        b[:, 0] = (a[:, 0] + 1) % 128
        assert (model(b)[:, -1] - before[:, -1]).abs().max() > 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[7], [5, 1, 33, 12], [1, 1, 1], [64, 3]])
def test_packed_sequences_are_each_alone(shape, lengths, make_model, tokens):
    """Sequences packed end to end give the logits that each gives alone, and the gradients of their sum."""
    model = make_model(**SHAPES[shape])
    sequences = [tokens(1, n, seed=n) for n in lengths]
    alone = torch.cat([model(s)[0] for s in sequences])
    packed = model(torch.cat(sequences, dim=1), Packing.of(lengths))[0]
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), parameters, allow_unused=True) for out in (alone, packed))):
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_absorbed_decode_is_the_naive_form(shape, make_model, tokens):
    """Decoding from the latents, rows at different positions, gives the logits of a full forward pass to 1e-4 in float32."""
    model, batch, steps = make_model(**SHAPES[shape]), tokens(3, 80), 6
    lengths = [40, 1, 73]
    cache = [Latents(model.config, 3, 80, torch.float32, "cpu") for _ in model.attentions()]
    with torch.no_grad():
        full = model(batch)
        model.hidden(batch[:, :74], cache=cache)  # right-padded: what lies behind a row's length is overwritten before it is seen
        for step in range(steps):
            at = torch.tensor(lengths) + step
            new = batch[torch.arange(3), at]
            visible = torch.arange(int(at.max()) + 1) <= at[:, None]
            logits = model.decode(new, at, cache, visible)
            torch.testing.assert_close(logits, full[torch.arange(3), at], atol=1e-4, rtol=0)


def test_collecting_changes_nothing(make_model, tokens):
    """Statistics leave the logits as they are, to the bit, and are gone when switched off."""
    model, batch = make_model(), tokens(2, 20)
    with torch.no_grad():
        plain = model(batch)
        model.collect(True)
        assert torch.equal(model(batch), plain)
        assert all(torch.isfinite(a.max_logit).all() for a in model.attentions())
        assert all(int(r.load.sum()) == 40 * 2 for r in model.routers())
        model.collect(False)
    assert all(a.max_logit is None for a in model.attentions()) and all(r.load is None for r in model.routers())


def test_weights_of_a_seed(make_model):
    """A seed gives the same weights whatever random numbers were drawn before, another seed others; norms start at one."""
    first = make_model(seed=3)
    torch.manual_seed(99)
    torch.rand(7)
    again, other = make_model(seed=3), make_model(seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == name.endswith("norm.weight"), name
    assert first.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.05)


def test_casting_keeps_routers_exact(make_model):
    """In bfloat16, the routers' weights and selection biases stay float32 and are not rounded on the way."""
    model = make_model()
    before = [(r.weight.detach().clone(), r.e_score_correction_bias.clone()) for r in model.routers()]
    model.cast(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    for router, (weight, bias) in zip(model.routers(), before):
        assert torch.equal(router.weight, weight) and torch.equal(router.e_score_correction_bias, bias)
