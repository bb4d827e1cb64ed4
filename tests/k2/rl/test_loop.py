import pytest
import torch

from k2.errors import K2Error
from k2.rl.loop import _chunks
from k2.rl.rollout import Episode
from k2.train.loop import Run


def run_in(tmp_path, log=lambda step, values: None):
    return Run("rl", tmp_path / "resume", 0.0, log)


def even(text):
    return len(text) > 0 and ord(text[0]) % 2 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_follows_the_trainer(make_rl, prompts, tmp_path, dtype):
    """After each step the engine's version is one higher and its weights are the trainer's, bit for bit in their dtype; they
    did change; the next rollout uses them."""
    loop, ptx = make_rl(even, dtype=dtype, ptx_weight=0.1)
    push, versions, heads = loop.push, [loop.engine.version], [loop.engine.model.lm_head.weight.clone()]

    def watched(version):
        push(version)
        versions.append(loop.engine.version)
        ours, theirs = loop.trainer.model.state_dict(), loop.engine.model.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(t.dtype == ours[n].dtype and torch.equal(t, ours[n]) for n, t in theirs.items())
        assert loop.engine.model.lm_head.weight.data_ptr() != loop.trainer.model.lm_head.weight.data_ptr()
        assert not torch.equal(theirs["lm_head.weight"], heads[-1])
        heads.append(theirs["lm_head.weight"].clone())

    loop.push = watched
    rows = loop.train(prompts, ptx, run_in(tmp_path))
    assert versions == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert ["rl/held_out" in row for row in rows] == [True, False, True, False, True]


def test_engine_and_trainer_agree_on_log_probabilities(make_rl, prompts, tmp_path):
    """Trap 17: two ways of computing (absorbed, one token at a time; naive, packed) differ by less than 1e-3 in float32 before
    and after updates. The engine's own are the policy's at temperature 1, whatever was sampled with."""
    loop, ptx = make_rl(even, temperature=1.7, final_temperature=0.4)
    rows = loop.train(prompts, ptx, run_in(tmp_path))
    assert all(0 <= row["rl/logprob_gap"] < 1e-3 for row in rows[1:])


def test_reward_rises_on_a_bandit(make_rl, prompts, tmp_path):
    """Half of the tokens are right: from about a half to nearly all within 20 steps, in training and on held-out prompts."""
    loop, ptx = make_rl(even, steps=20, held_out_every=20, held_out_prompts=32)
    rows = loop.train(prompts, ptx, run_in(tmp_path))
    first, last = rows[1]["rl/reward"], sum(row["rl/reward"] for row in rows[-3:]) / 3
    assert first < 0.7 and last > 0.8
    assert rows[0]["rl/held_out"] < 70 and rows[-1]["rl/held_out"] > 85
    assert rows[-1]["rl/held_out"] == rows[-1]["rl/held_out_bandit"]


def test_the_first_loss_is_known_from_the_rewards(make_rl, prompts, tmp_path):
    """On-policy log(pi / pi_old) is 0, so the first loss is the mean of A^2 / (2 tau) plus ptx_weight times the PTX loss."""
    tau = 0.25
    loop, ptx = make_rl(even, steps=1, tau=tau, prompts_per_step=1, held_out_every=5)
    row = loop.train(prompts, ptx, run_in(tmp_path))[1]
    p = row["rl/reward"]  # of one group of 0s and 1s: the mean of A^2 is p (1 - p)
    assert row["rl/dead_groups"] == 0 and row["rl/loss"] == pytest.approx(p * (1 - p) / (2 * tau), rel=1e-3)
    assert row["rl/group_spread"] == pytest.approx((p * (1 - p)) ** 0.5)
    loop, ptx = make_rl(even, steps=1, tau=tau, prompts_per_step=1, held_out_every=5, ptx_weight=0.5)
    (batch, *_) = ptx.step(0)
    targets = batch.targets[0][batch.weights[0] > 0]
    with torch.no_grad():
        logits = loop.trainer.model(batch.inputs, batch.packing)[0][batch.weights[0] > 0]
    nll = torch.nn.functional.cross_entropy(logits, targets).item()
    assert loop.train(prompts, ptx, run_in(tmp_path / "ptx"))[1]["rl/loss"] == pytest.approx(row["rl/loss"] + 0.5 * nll, rel=1e-3)


def test_nothing_to_learn_is_an_error_with_advice(make_rl, prompts, tmp_path):
    """Trap 13: when no answer is right, all groups are dead: the stage stops and says what to change. Weights stay as they are."""
    loop, ptx = make_rl(lambda text: False)
    before = {n: t.clone() for n, t in loop.trainer.model.state_dict().items()}
    with pytest.raises(K2Error, match=r"rl step 1: in each of 4 groups all 8 answers earn the same \(mean reward 0\.00\).*curate"):
        loop.train(prompts, ptx, run_in(tmp_path))
    assert all(torch.equal(t, before[n]) for n, t in loop.trainer.model.state_dict().items())


def test_all_right_ends_the_training_in_peace(make_rl, prompts, tmp_path, capsys):
    """When every answer is right it stops with a word, and the last row has the held-out reward of the policy as it is then."""
    logged = {}
    loop, ptx = make_rl(lambda text: True)
    rows = loop.train(prompts, ptx, run_in(tmp_path, lambda step, values: logged.setdefault(step, {}).update(values)))
    assert len(rows) == 1 and rows[0]["rl/held_out"] == 100.0 and "every answer is right after 0 steps" in capsys.readouterr().out
    switch = {"right": even}
    loop, ptx = make_rl(lambda text: switch["right"](text), held_out_every=10)
    push = loop.push

    def solved_after_one(version):
        push(version)
        switch["right"] = lambda text: True

    loop.push = solved_after_one
    rows = loop.train(prompts, ptx, run_in(tmp_path / "second", lambda step, values: logged.setdefault(step, {}).update(values)))
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["rl/held_out"] == 100.0 and logged[1]["rl/held_out"] == 100.0


def test_dead_groups_are_counted_and_dropped(make_rl, prompts, tmp_path):
    """Prompts that always earn 0 or always 1 beside one that earns either: two groups of three are dead, training goes on."""
    loop, ptx = make_rl(even, steps=1, prompts_per_step=3)
    domain, env = loop.domains["bandit"], loop.domains["bandit"].env
    constant = {prompts[0]["prompt"]: lambda text: True, prompts[1]["prompt"]: lambda text: False}

    def of(task):
        episode = env(task)
        episode.right = constant.get(task["prompt"], even)
        return episode

    domain.env = of
    rows = loop.train(prompts[:3], ptx, run_in(tmp_path))
    assert rows[1]["rl/dead_groups"] == 2.0 and 0 < rows[1]["rl/loss"] < 1


def test_two_and_two_steps_are_four(make_rl, prompts, tmp_path):
    """Stopped after two steps and taken up by new objects: the same weights, in trainer and engine, and the same history."""

    class Killed(Exception):
        pass

    def go(folder, seed=0, stop=None):
        loop, ptx = make_rl(even, seed, ptx_weight=0.1)

        def log(step, values):
            if step == stop:
                raise Killed

        try:
            return loop, loop.train(prompts, ptx, run_in(tmp_path / folder, log))
        except Killed:
            return loop, []

    straight, expected = go("a")
    assert go("b", stop=3)[1] == []
    resumed, rows = go("b", seed=5)
    for name, t in straight.trainer.state().items():
        assert torch.equal(resumed.trainer.state()[name], t), name
    assert resumed.engine.version == 4
    timeless = [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in expected]
    assert [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows] == timeless


def test_chunks_hold_every_sample_once():
    """Micro-batches of at most 8,192 tokens, unless one sample alone is longer."""
    lengths = [3000, 3000, 3000, 9000, 100]
    parts = list(_chunks(list(range(5)), [Episode([0] * n, [False] * n) for n in lengths]))
    assert parts == [[0, 1], [2], [3], [4]]
