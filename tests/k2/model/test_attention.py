import math

import pytest
import torch

from k2.model.attention import Packing, flash, max_logit

SCALE = 0.2


def brute_force(q, k, real=None):
    """(H,) max over the batch of scale * q_i . k_j, j <= i, i not padding."""
    T = q.shape[2]
    scores = (q.double() @ k.double().transpose(2, 3)) * SCALE
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    if real is not None:
        hidden = hidden | ~real[:, None, :, None]
    return scores.masked_fill(hidden, -math.inf).amax(dim=(0, 2, 3)).float()


def lse_of(q, k):
    return flash(q, k, torch.zeros_like(q), SCALE)[1]


def draw(kind, B, H, T, D, dtype):
    g = torch.Generator().manual_seed(T)
    q, k = (torch.randn(B, H, T, D, generator=g) for _ in range(2))
    if kind == "flat":  # logits almost equal: the log-sum-exp says nothing about the maximum
        q, k = q * 1e-3 + 1, k * 1e-3 + 1
    elif kind == "peaked":  # one enormous logit in one head
        q[0, 1, T // 2], k[0, 1, T // 3] = 20.0, 20.0
    elif kind == "negative":  # every logit below zero
        q, k = q.abs() + 0.1, -k.abs() - 0.1
    elif kind == "hidden":  # the largest product lies in the masked half
        q[0, 0, 0], k[0, 0, T - 1] = 30.0, 30.0
    elif kind == "many":  # many tokens tie for many rows, so that early rows have a small log-sum-exp and the maximum
        k[:] = k[:, :, :1]
        q[:, :, 0] = k[:, :, 0] * 3
        q[:, :, 1:] = k[:, :, 1:] * 2.9
    return q.to(dtype), k.to(dtype)


@pytest.mark.parametrize("kind", ["random", "peaked", "flat", "negative", "hidden", "many"])
@pytest.mark.parametrize("T", [1, 5, 130, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_logit_is_the_true_maximum(kind, T, dtype):
    """Random, peaked, flat, negative and masked-out logits: the maximum of each head, as brute force has it."""
    q, k = draw(kind, 2, 3, T, 16, dtype)
    found = max_logit(q, k, lse_of(q, k), SCALE)
    torch.testing.assert_close(found, brute_force(q, k), atol=1e-3, rtol=1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("kind", ["random", "flat", "negative"])
@pytest.mark.parametrize("lengths", [[300, 2, 77], [1, 1], [9, 200]])
def test_max_logit_never_sees_padding(kind, lengths):
    """Rows that only pad a short sequence do not count, however large their logits are."""
    T = max(lengths)
    q, k = draw(kind, len(lengths), 2, T, 16, torch.float32)
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    q = torch.where(real[:, None, :, None], q, 50.0)
    found = max_logit(q, k, lse_of(q, k), SCALE, real)
    torch.testing.assert_close(found, brute_force(q, k, real), atol=1e-4, rtol=1e-5)


def test_max_logit_may_be_loose_only_below_the_threshold():
    """With `exact_above`, a head above it is exact, and one below it is reported below it."""
    q, k = draw("flat", 1, 3, 600, 16, torch.float32)
    q[0, 1] *= 50
    true = brute_force(q, k)
    found = max_logit(q, k, lse_of(q, k), SCALE, exact_above=20.0)
    assert (true > 20.0).tolist() == [False, True, False]
    torch.testing.assert_close(found[1], true[1], atol=1e-3, rtol=1e-5)
    assert (found <= true + 1e-4).all() and (found > true - 1).all()


def test_model_maxima_with_and_without_packing(make_model, tokens):
    """What the layers collect over two micro-batches is the brute-force maximum of both; packed or apart makes no difference."""
    model, a, b = make_model(), tokens(1, 50), tokens(1, 20, seed=1)
    with torch.no_grad():
        model.collect(True)
        for batch in (a, b):
            model(batch)
        apart = torch.stack([x.max_logit for x in model.attentions()])
        model.collect(True)
        model(torch.cat([a, b], dim=1), Packing.of([50, 20]))
        packed = torch.stack([x.max_logit for x in model.attentions()])
        torch.testing.assert_close(apart, packed, atol=1e-4, rtol=1e-5)
        first, truth = model.model.layers[0], []
        for batch in (a, b):
            x = first.input_layernorm(model.model.embed_tokens(batch))
            cos, sin = model.rotation(torch.arange(batch.shape[1]))
            q_nope, q_rope = first.self_attn.queries(x, cos, sin)
            latent, k_rope = first.self_attn.latents(x, cos, sin)
            k_nope = first.self_attn.kv_b_proj(latent).unflatten(-1, (4, -1))[..., :16]
            scores = torch.einsum("bihn,bjhn->hij", q_nope, k_nope) + torch.einsum("bihr,bjr->hij", q_rope, k_rope)
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            truth.append((scores * first.self_attn.scale).masked_fill(hidden, -math.inf).amax((1, 2)))
        torch.testing.assert_close(apart[0], torch.stack(truth).amax(0), atol=1e-4, rtol=1e-5)


def test_memory_is_linear_in_the_sequence(make_model, tokens):
    """A forward and backward over a four times longer sequence, statistics included, takes at most 4.5 times the peak memory."""
    model = make_model(num_hidden_layers=1, first_k_dense_replace=1)

    def peak(T: int) -> int:
        model.collect(True)
        batch = tokens(1, T)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model.hidden(batch).sum().backward()
        now = highest = 0
        for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()  # type: ignore[attr-defined]
                highest = max(highest, now)
        return highest

    peak(256)
    short, long = peak(1024), peak(4096)
    assert short > 1024 * 64 * 4 * 4  # the profile saw the activations
    assert long <= 4.5 * short, (short, long)


def test_attention_backward_equals_the_formula():
    """Flash attention with its padded head sizes: output and gradients of the formula, values narrower and wider."""
    for V in (8, 24):
        g = torch.Generator().manual_seed(V)
        q, k = (torch.randn(1, 2, 20, 16, generator=g, requires_grad=True) for _ in range(2))
        v = torch.randn(1, 2, 20, V, generator=g, requires_grad=True)
        hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
        expected = ((q @ k.transpose(2, 3)) * SCALE).masked_fill(hidden, -math.inf).softmax(-1) @ v
        found, _ = flash(q, k, v, SCALE)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        weight = torch.randn(expected.shape, generator=g)
        for a, b in zip(*(torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (found, expected))):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
