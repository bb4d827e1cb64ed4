import math

import pytest
import torch

from k2.errors import K2Error
from k2.train.batches import Batch


def batches(tokens, micro):
    parts = tokens.split(micro)
    return [Batch(t[:, :-1], t[:, 1:], (t[:, 1:] % 3 > 0).float()) for t in parts]


def test_accumulation_of_four_is_one(make_trainer, tokens):
    """8 rows in one micro-batch or in four, unequally weighted: the same gradients, statistics and step up to rounding."""
    data = tokens(8, 33)
    one, four = make_trainer(), make_trainer()
    total = sum(float(b.weights.sum()) for b in batches(data, 8))
    for trainer, micro in ((one, 8), (four, 2)):
        for batch in batches(data, micro):
            trainer.nll(batch, 1 / total).backward()
            trainer.optimizer.accumulate()
    for name, grad in one.optimizer.grads.items():
        torch.testing.assert_close(four.optimizer.grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    one.optimizer.grads, four.optimizer.grads = {}, {}
    before = {n: t.clone() for n, t in one.optimizer.master.items()}
    a, b = one.language_model_step(batches(data, 8), 1e-2), four.language_model_step(batches(data, 2), 1e-2)
    assert a == pytest.approx(b, rel=1e-3)
    for name, start in before.items():
        moved, difference = one.optimizer.master[name] - start, one.optimizer.master[name] - four.optimizer.master[name]
        assert difference.norm() < 0.02 * moved.norm(), name  # Newton-Schulz works in bfloat16, Adam's first step on signs


def test_the_routers_bias_moves_against_the_load(make_trainer, tokens):
    """Counted by hand from the experts that the routers chose: overloaded experts go down, the others up, the mean stays;
    moe/max_violation is max / mean - 1 of each layer and the largest of them."""
    rate = 0.01
    trainer = make_trainer(bias_update_rate=rate)
    routers, chosen = trainer.model.routers(), {}
    before = [router.e_score_correction_bias.clone() for router in routers]
    for i, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, out, i=i: chosen.setdefault(i, []).append(out[1]))
    row = trainer.language_model_step(batches(tokens(8, 33), 4), 1e-3)
    violations = {}
    for i, router in enumerate(routers):
        load = [sum(int((part == e).sum()) for part in chosen[i]) for e in range(len(before[i]))]
        assert sum(load) == 8 * 32 * 2
        mean = sum(load) / len(load)
        sign = torch.tensor([math.copysign(1, mean - n) if n != mean else 0.0 for n in load])
        torch.testing.assert_close(router.e_score_correction_bias - before[i], rate * (sign - sign.mean()), atol=1e-6, rtol=0)
        violations[i + 1] = max(load) / mean - 1  # layer 0 is dense
    assert {i: row[f"moe/max_violation_layer_{i}"] for i in violations} == pytest.approx(violations)
    assert row["moe/max_violation"] == pytest.approx(max(violations.values()))


def test_a_rate_of_zero_leaves_the_bias(make_trainer, tokens):
    """So it is in annealing and fine-tuning."""
    trainer = make_trainer(bias_update_rate=0.0)
    before = [router.e_score_correction_bias.clone() for router in trainer.model.routers()]
    trainer.language_model_step(batches(tokens(2, 17), 2), 1e-3)
    assert all(torch.equal(router.e_score_correction_bias, old) for router, old in zip(trainer.model.routers(), before))


def test_training_lowers_the_loss_on_what_is_trained(make_trainer, tokens):
    """train/loss is the mean over the weighted targets: it begins near what the untrained model has, and falls."""
    trainer, data = make_trainer(bias_update_rate=0.001), batches(tokens(4, 33), 2)
    losses = [trainer.language_model_step(data, 5e-3)["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5 and losses[0] == pytest.approx(math.log(128), rel=0.2)


def test_masters_begin_at_the_weights_as_given(make_model, make_trainer):
    """Not at their bfloat16 rounding, in which the model computes."""
    given, trainer = dict(make_model(0).named_parameters()), make_trainer(0, dtype="bfloat16")
    assert all(torch.equal(master, given[name]) for name, master in trainer.optimizer.master.items())
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16


def test_a_loss_that_is_not_finite_stops_the_stage(make_trainer, tokens):
    """With advice, before it reaches the weights."""
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.lm_head.weight[0] = math.inf
    before = trainer.optimizer.master["model.embed_tokens.weight"].clone()
    with pytest.raises(K2Error, match="lower the learning rate"):
        trainer.language_model_step(batches(tokens(2, 9), 2), 1e-3)
    assert torch.equal(trainer.optimizer.master["model.embed_tokens.weight"], before)
