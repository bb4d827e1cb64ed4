import pytest

from k2.config import OptimConfig
from k2.optim.schedule import wsd

BATCH = 67_108_864  # tokens of a step in K2
PRETRAIN = OptimConfig(lr=2e-4, final_lr=2e-5, warmup_tokens=500 * BATCH, decay_fraction=5.5 / 15.5)
ANNEAL = OptimConfig(lr=2e-5, final_lr=7e-6, warmup_tokens=0, decay_fraction=1.0)


@pytest.mark.parametrize(
    ("tokens", "lr"),
    [
        (0, 0.0),
        (250 * BATCH, 1e-4),  # half-way through the 500 steps of warm-up
        (500 * BATCH, 2e-4),
        (5e12, 2e-4),
        (10e12, 2e-4),  # the last token of the constant part
        (10e12 + 5.5e12 / 3, 2e-5 + 1.8e-4 * 0.75),  # cos 60 degrees
        (12.75e12, 1.1e-4),  # the middle of the cosine
        (15.5e12, 2e-5),
        (16e12, 2e-5),  # stays there
    ],
)
def test_k2s_pretraining_schedule(tokens, lr):
    """500 steps of warm-up to 2e-4, constant for 10T tokens, cosine to 2e-5 over 5.5T (report section 2.5)."""
    assert wsd(tokens, 15.5e12, PRETRAIN) == pytest.approx(lr, rel=1e-9, abs=1e-15)


def test_k2s_annealing_schedule():
    """From 2e-5 to 7e-6 over 400B tokens, without warm-up: continuous with the end of pre-training."""
    assert wsd(0, 400e9, ANNEAL) == pytest.approx(wsd(15.5e12, 15.5e12, PRETRAIN))
    assert wsd(200e9, 400e9, ANNEAL) == pytest.approx(1.35e-5)
    assert wsd(400e9, 400e9, ANNEAL) == pytest.approx(7e-6)


def test_without_decay_the_rate_stays():
    """decay_fraction 0 is a constant rate; decay to final_lr = lr as well."""
    constant = OptimConfig(lr=1e-3, final_lr=0.0, warmup_tokens=0, decay_fraction=0.0)
    assert [wsd(t, 1000, constant) for t in (0, 500, 999)] == [1e-3] * 3


def test_the_rate_never_rises_after_warm_up():
    """Up during warm-up, then never up again, and always between 0 and the peak."""
    optim = OptimConfig(lr=1e-3, final_lr=1e-4, warmup_tokens=100, decay_fraction=0.3)
    rates = [wsd(t, 1000, optim) for t in range(0, 1001, 5)]
    assert all(b >= a for a, b in zip(rates[:21], rates[1:21])) and all(b <= a for a, b in zip(rates[20:], rates[21:]))
    assert max(rates) == 1e-3 and rates[-1] == pytest.approx(1e-4)
