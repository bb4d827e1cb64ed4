import math
from pathlib import Path

import numpy as np
import pytest
import torch

from k2.config import OptimConfig
from k2.data.shards import TokenRows, write_rows
from k2.train.batches import RowBatches
from k2.train.loop import Run, bits_per_byte, train

T, V = 16, 128
OPTIM = OptimConfig(lr=1e-2, final_lr=1e-3, warmup_tokens=2 * 4 * T, decay_fraction=0.5)


@pytest.fixture
def rows(tmp_path: Path) -> TokenRows:
    """10 rows, so that 6 steps of 4 go over more than two epochs."""
    tokens = np.random.default_rng(0).integers(0, V, (10, T + 1))
    write_rows(tmp_path, "validation", tokens.astype("<u2"), np.arange(10) + 5)
    return TokenRows(tmp_path, "validation")


class Killed(Exception):
    pass


class Watched:
    """Batches that say which steps were asked for, and fail at one of them."""

    def __init__(self, batches: RowBatches, fails_at: int = -1):
        self.batches, self.fails_at, self.asked = batches, fails_at, []

    def step(self, index):
        if index == self.fails_at:
            raise Killed
        self.asked.append(index)
        return self.batches.step(index)


def timeless(history):
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in history]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_six_steps_are_three_and_three(make_trainer, rows, tmp_path, dtype):
    """Trap 3: stopped after 3 steps and taken up by a new process's objects, weights, momenta, router biases, learning rate, data
    position and history are those of 6 steps in one go, bit for bit."""

    def go(folder, fails_at=-1, seed=0):
        trainer = make_trainer(seed, dtype=dtype, bias_update_rate=0.01)
        batches, logged = Watched(RowBatches(rows, T, 4 * T, 2 * T, seed=1), fails_at), {}
        run = Run("toy", tmp_path / folder, 0.0, lambda step, values: logged.update({step: dict(values)}))
        history = []
        try:
            history = train(
                trainer, batches, 6 * 4 * T, 4 * T, OPTIM, run, lambda: bits_per_byte(trainer.model, rows, 64), every=2 * 4 * T
            )
        except Killed:
            pass
        return trainer, batches, history, logged

    straight, _, expected, log = go("straight")
    _, stopped, none, _ = go("stopped", fails_at=3)
    resumed, second, history, again = go("stopped", seed=9)  # begins from other weights, which must not matter
    assert none == [] and stopped.asked == [0, 1, 2] and second.asked == [3, 4, 5]
    assert timeless(history) == timeless(expected) and len(history) == 6
    assert timeless(again.values()) == timeless(log.values()) and sorted(again) == [1, 2, 3, 4, 5, 6]
    a, b = straight.state(), resumed.state()
    assert a.keys() == b.keys() and any(n.startswith("bias.") for n in a) and any(n.startswith("momentum.") for n in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    for name, p in straight.model.state_dict().items():
        assert torch.equal(p, resumed.model.state_dict()[name]), name
    rates = [row["optim/lr"] for row in history]
    assert [rates[i] for i in (0, 1, 2, 5)] == pytest.approx([OPTIM.lr / 2, OPTIM.lr, OPTIM.lr, OPTIM.final_lr])
    assert [row["data/tokens"] for row in history] == [64.0 * (i + 1) for i in range(6)]
    assert ["validation/bits_per_byte" in row for row in history] == [False, True] * 3


def test_bits_per_byte_of_a_uniform_model(make_model, rows):
    """Every token costs log2(V) bits; the bytes are those of the rows that were read, and no others."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    bits = math.log2(V) * T
    assert bits_per_byte(model, rows, 10 * T) == pytest.approx(10 * bits / sum(range(5, 15)), rel=1e-5)
    assert bits_per_byte(model, rows, 3 * T + 1, micro_batch=2) == pytest.approx(3 * bits / (5 + 6 + 7), rel=1e-5)
    assert bits_per_byte(model, rows, 1) == pytest.approx(bits / 5, rel=1e-5)
    assert bits_per_byte(model, rows, 10**9) == bits_per_byte(model, rows, 10 * T)


def test_bits_per_byte_is_the_mean_nll_by_definition(make_model, rows):
    """Against the full logits of the whole batch."""
    model, t = make_model(), rows.read(np.arange(10))
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten(), reduction="sum").item()
    assert bits_per_byte(model, rows, 10 * T, micro_batch=3) == pytest.approx(nats / math.log(2) / sum(range(5, 15)), rel=1e-5)
