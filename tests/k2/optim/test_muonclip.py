import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from k2.config import load_params
from k2.model.hf import hf_views
from k2.optim.muonclip import MuonClip
from k2.optim.newton_schulz import newton_schulz

CONFIG = dataclasses.replace(load_params(Path(__file__).parents[3] / "params.yaml").muonclip, max_grad_norm=None)


def configured(**changes):
    return dataclasses.replace(CONFIG, **changes)


def backward(model, batch):
    """The mean cross-entropy's gradient, with statistics collected."""
    model.collect(True)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()


def random_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def copied(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def is_adamw(name):
    return name.startswith(("model.embed_tokens", "lm_head")) or "norm" in name


# -- who takes what ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_every_parameter_is_claimed_once(q_lora_rank, make_model):
    """Muon takes all matrices but embedding and head, AdamW these and the norms; none is left out, none taken twice."""
    model = make_model(q_lora_rank=q_lora_rank)
    optimizer = MuonClip(model, CONFIG)
    names = [n for n, _ in model.named_parameters()]
    assert sorted([*optimizer.muon, *optimizer.adamw_names]) == sorted(names)
    assert set(optimizer.adamw_names) == {n for n in names if is_adamw(n)}
    assert sorted(n for bucket in optimizer.buckets.values() for n in bucket) == sorted(optimizer.muon)
    matrices = {n: t for n, t in hf_views(dict(model.named_parameters())).items() if not is_adamw(n)}
    attention, dense, moe = 5 if q_lora_rank else 4, 3, 1 + 8 * 3 + 3
    assert len(matrices) == 3 * attention + dense + 2 * moe
    assert sum(t.numel() for t in matrices.values()) == sum(optimizer.params[n].numel() for n in optimizer.muon)


# -- equality with references ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torchs_muon_and_adamw(nesterov, make_model, tokens):
    """Over 12 steps of a real loss, every matrix moves as torch.optim.Muon moves it (matched RMS, each expert, gate and up alone)
    and the rest as AdamW does. torch's buffer is (1 - momentum) times ours; its Newton-Schulz normalises that away."""
    lr, ours, theirs = 2e-3, make_model(), make_model()
    start = hf_views(copied(ours))
    optimizer = MuonClip(ours, configured(nesterov=nesterov, qk_clip_tau=None))
    leaves = {n: torch.nn.Parameter(t) for n, t in hf_views({n: p.data for n, p in theirs.named_parameters()}).items()}
    muon = torch.optim.Muon(
        [p for n, p in leaves.items() if not is_adamw(n)],
        lr=lr, momentum=0.95, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW([p for n, p in leaves.items() if is_adamw(n)], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(12):
        batch = tokens(16, 65, seed=step)
        backward(ours, batch)
        optimizer.step(lr)
        backward(theirs, batch)
        for name, grad in hf_views({n: p.grad for n, p in theirs.named_parameters()}).items():
            leaves[name].grad = grad
        muon.step()
        adamw.step()
        theirs.zero_grad()
        if step in (0, 3, 11):
            leaf_moves = {n: (leaves[n] - start[n]).norm() for n in start}
            apart = {n: ((w - leaves[n]).norm() / leaf_moves[n]).item() for n, w in hf_views(copied(ours)).items()}
            assert max(apart.values()) < 0.15, max(apart, key=apart.__getitem__)
            assert sum(apart.values()) / len(apart) < 0.08  # with the wrong momentum 0.21


def test_experts_are_orthogonalised_one_by_one(make_model):
    """A stacked weight moves as each of its matrices does alone, and an expert without gradient does not move at all."""
    model = make_model()
    optimizer, start = MuonClip(model, configured(weight_decay=0.0)), copied(model)
    random_gradients(model)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    optimizer.params[name].grad[3] = 0  # type: ignore[index]
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    optimizer.step(1e-2)
    for e in range(8):
        for half in (slice(0, 32), slice(32, 64)):
            moved = (optimizer.params[name][e, half] - start[name][e, half]).detach()
            alone = newton_schulz(grads[name][e, half].bfloat16()[None], 5)[0].float() * (-1e-2 * 0.2 * math.sqrt(64))
            if e == 3:
                assert moved.abs().max() == 0
            else:
                assert (moved - alone).norm() < 0.05 * alone.norm()  # bfloat16, of inputs that differ in scale


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (8, 32, 96), (96, 96)])
def test_newton_schulz_orthogonalises(shape):
    """Singular values end within [0.6, 1.25] (but the tiny ones of a square random matrix stay small); singular vectors stay."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(newton_schulz(g, 5).double())
    assert s.max() < 1.25
    assert s.min() > 0.6 or shape == (96, 96)
    u, _, vh = torch.linalg.svd(g.double(), full_matrices=False)
    cosine = (newton_schulz(g, 5).double() * (u @ vh)).sum((-2, -1)) / min(shape[-2:])
    assert (cosine > 0.75).all() and (cosine < 1.1).all()


def test_update_rms_is_matched(make_model):
    """Each matrix, whatever its shape, moves by an RMS of 0.2 times the learning rate, up to the size of the singular values that
    five steps leave: 0.79 to 1.1 on random matrices (0.96 at 256 x 768)."""
    model = make_model(hidden_size=128, moe_intermediate_size=48)
    optimizer, start = MuonClip(model, configured(weight_decay=0.0)), hf_views(copied(model))
    random_gradients(model)
    stats = optimizer.step(1e-2)
    for name, w in hf_views(copied(model)).items():
        if not is_adamw(name):
            rms = (w - start[name]).square().mean().sqrt().item() / 1e-2
            assert 0.79 * 0.2 <= rms <= 1.1 * 0.2, (name, w.shape, rms)
    assert stats["optim/update_rms"] == pytest.approx(0.2 * 0.87, rel=0.05)


def test_weight_decay_uses_the_base_rate(make_model):
    """Decay is lr times weight_decay on every parameter, whatever the RMS factor of its shape: half of lr * 0.1 twice as small."""
    model = make_model()
    plain, decayed = make_model(), make_model()
    for m, decay in ((plain, 0.0), (decayed, 0.1)):
        random_gradients(m)
        MuonClip(m, configured(weight_decay=decay)).step(0.5)
    for (name, w), a, b in zip(model.named_parameters(), plain.parameters(), decayed.parameters()):
        torch.testing.assert_close(a - b, w * 0.05, atol=1e-5, rtol=1e-4, msg=name)


def test_the_raw_gradient_is_clipped(make_model):
    """The norm reported is the raw gradient's; clipping scales what AdamW sees and leaves the size of Muon's update as it is."""
    big, small = make_model(), make_model()
    random_gradients(big)
    raw = torch.stack([p.grad.norm() for p in big.parameters()]).norm().item()  # type: ignore[union-attr]
    clipped, free = MuonClip(big, configured(max_grad_norm=1.0)), MuonClip(small, configured(max_grad_norm=None))
    random_gradients(small)
    grads = {n: p.grad.clone() for n, p in small.named_parameters()}  # type: ignore[union-attr]
    a, b = clipped.step(1e-2), free.step(1e-2)
    assert a["optim/grad_norm"] == pytest.approx(raw, rel=1e-5) and b["optim/grad_norm"] == pytest.approx(raw, rel=1e-5)
    assert a["optim/update_rms"] == pytest.approx(b["optim/update_rms"], rel=0.01)
    for name in clipped.adamw_names:
        torch.testing.assert_close(clipped.state()[f"adamw.exp_avg.{name}"], grads[name] * 0.1 / raw, rtol=1e-4, atol=1e-9)
    for name in clipped.muon:
        torch.testing.assert_close(clipped.momentum[name], free.momentum[name] / raw, rtol=1e-4, atol=1e-9)


# -- QK-Clip -----------------------------------------------------------------------------------------------------------------------
def layer_logits(model, batch):
    """(H, T, T) scaled logits of the first layer's attention, whose input no clip changes."""
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(batch))
    cos, sin = model.rotation(torch.arange(batch.shape[1]))
    q_nope, q_rope = layer.self_attn.queries(x, cos, sin)
    latent, k_rope = layer.self_attn.latents(x, cos, sin)
    k_nope = layer.self_attn.kv_b_proj(latent).unflatten(-1, (4, -1))[..., :16]
    logits = torch.einsum("bihn,bjhn->hij", q_nope, k_nope) + torch.einsum("bihr,bjr->hij", q_rope, k_rope)
    return logits * layer.self_attn.scale


@pytest.mark.parametrize("part", ["nope", "rope", "mixed"])
@pytest.mark.parametrize("q_lora_rank", [24, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clipped_head_obeys_its_factor(part, q_lora_rank, dtype, make_model, tokens):
    """A head above tau has its logits scaled by exactly tau / max, whether they come from positions, content or both; the other
    heads, the values and the shared rotary key do not change by a bit; and it stays so after the next step at rate 0."""
    model, batch = make_model(q_lora_rank=q_lora_rank).cast(dtype), tokens(1, 33)
    query = "q_proj" if q_lora_rank is None else "q_b_proj"
    with torch.no_grad():
        q = getattr(model.model.layers[0].self_attn, query).weight.unflatten(0, (4, 24))
        q[1], q[2] = q[1] * 8, q[2] * 16
        if part == "nope":
            q[1:3, 16:] = 0
        elif part == "rope":
            q[1:3, :16] = 0
        before = layer_logits(model, batch[:, :-1]).float()
    backward(model, batch)
    maxima = model.model.layers[0].self_attn.max_logit.clone()
    tau = maxima[[0, 3]].max().item() * 1.01
    assert (maxima[1:3] > tau).all()
    optimizer, start = MuonClip(model, configured(qk_clip_tau=tau)), copied(model)
    stats = optimizer.step(0.0)
    gamma = torch.ones(4)
    gamma[1:3] = tau / maxima[1:3]
    assert stats["attn/max_logit_layer_0"] == pytest.approx(maxima.max().item()) and stats["attn/clipped_heads"] >= 2

    def check():
        exact = dtype == torch.float32
        with torch.no_grad():
            after = layer_logits(model, batch[:, :-1]).float()
        torch.testing.assert_close(
            after[1:3], before[1:3] * gamma[1:3, None, None], atol=1e-4 if exact else 0.05 * tau, rtol=1e-4 if exact else 0.05
        )
        now = copied(model)
        name = "model.layers.0.self_attn."
        assert torch.equal(now[f"{name}kv_a_proj_with_mqa.weight"], start[f"{name}kv_a_proj_with_mqa.weight"])
        q_now, q_start = (w[f"{name}{query}.weight"].unflatten(0, (4, 24)) for w in (now, start))
        kv_now, kv_start = (w[f"{name}kv_b_proj.weight"].unflatten(0, (4, 28)) for w in (now, start))
        assert torch.equal(q_now[[0, 3]], q_start[[0, 3]]) and torch.equal(kv_now[[0, 3]], kv_start[[0, 3]])
        assert torch.equal(kv_now[:, 16:], kv_start[:, 16:])
        for n, w in now.items():
            if "self_attn" not in n:
                assert torch.equal(w, start[n]), n
            assert torch.equal(w, optimizer.master[n].to(w.dtype)), n

    check()
    backward(model, batch)
    assert (model.model.layers[0].self_attn.max_logit <= tau * (1.0001 if dtype == torch.float32 else 1.03)).all()
    optimizer.config = configured(qk_clip_tau=tau * 1.05)  # the clip itself is done: what follows must not undo it
    optimizer.step(0.0)
    check()


def test_negative_and_small_maxima_do_nothing(make_model):
    """Maxima below tau, negative ones too, clip nothing and bring no NaN."""
    model = make_model()
    optimizer, start = MuonClip(model, CONFIG), copied(model)
    random_gradients(model)
    model.collect(True)
    for attention in model.attentions():
        attention.max_logit = torch.tensor([-3.0, -1e4, 0.0, 99.9])
    stats = optimizer.step(0.0)
    assert stats["attn/clipped_heads"] == 0 and stats["attn/max_logit"] == pytest.approx(99.9)
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


def test_no_tau_no_clip(make_model, tokens):
    """qk_clip_tau null leaves the largest logits alone, and still reports them."""
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_b_proj.weight *= 1000
    start = copied(model)
    backward(model, tokens(1, 33))
    stats = MuonClip(model, configured(qk_clip_tau=None)).step(0.0)
    assert stats["attn/max_logit"] > 100 and stats["attn/clipped_heads"] == 0
    assert all(torch.equal(p, start[n]) for n, p in model.named_parameters())


# -- state -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_six_steps_are_three_and_three(dtype, make_model, tokens):
    """A new optimizer on a new model, given the state after three steps, ends three later with the bits of an unbroken run."""

    def run(model, optimizer, steps):
        for step in steps:
            backward(model, tokens(2, 17, seed=step))
            optimizer.step(1e-2 / (step + 1))

    whole = make_model().cast(dtype)
    unbroken = MuonClip(whole, configured(max_grad_norm=1.0, qk_clip_tau=5.0))
    run(whole, unbroken, range(6))
    first = make_model().cast(dtype)
    before = MuonClip(first, configured(max_grad_norm=1.0, qk_clip_tau=5.0))
    run(first, before, range(3))
    state = {n: t.clone() for n, t in before.state().items()}
    second = make_model(seed=7).cast(dtype)
    for router, other in zip(second.routers(), first.routers()):
        router.e_score_correction_bias.copy_(other.e_score_correction_bias)
    after = MuonClip(second, configured(max_grad_norm=1.0, qk_clip_tau=5.0))
    after.load_state(state)
    run(second, after, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters()))
    assert unbroken.state().keys() == after.state().keys()
    assert all(torch.equal(t, after.state()[n]) for n, t in unbroken.state().items())


def test_accumulated_gradients_are_the_sum(make_model, tokens):
    """Four micro-batches, accumulated in float32, have the gradient of one batch of their sum, and nothing is left over."""
    whole, parts = make_model(), make_model()
    batch = tokens(4, 17)
    a, b = MuonClip(whole, CONFIG), MuonClip(parts, CONFIG)
    whole.collect(True)
    F.cross_entropy(whole(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").backward()
    parts.collect(True)
    for row in batch.split(1):
        F.cross_entropy(parts(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten(), reduction="sum").backward()
        b.accumulate()
        assert all(p.grad is None for p in parts.parameters())
    for name, grad in b.grads.items():
        torch.testing.assert_close(grad, a.params[name].grad, atol=1e-4, rtol=1e-3)
    assert b.step(1e-3)["optim/grad_norm"] == pytest.approx(a.step(1e-3)["optim/grad_norm"], rel=1e-4)
