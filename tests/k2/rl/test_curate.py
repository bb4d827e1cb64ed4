import dataclasses
from pathlib import Path

import pytest

from k2.config import GymConfig, load_params
from k2.errors import K2Error
from k2.gym import make
from k2.rl.curate import curate
from k2.rl.rollout import start
from k2.serve.engine import Completion

GYM = GymConfig(
    domains={"gcd": {"dataset": "gcd", "min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 50}},
    max_new_tokens={"gcd": 8},
    held_out_seed=1000003,
)
CONFIG = dataclasses.replace(
    load_params(Path(__file__).parents[3] / "params.yaml").curate,
    prompts_per_domain=10, samples_per_prompt=4, min_pass_rate=0.25, max_pass_rate=0.75,
)  # fmt: skip


class Scripted:
    """An engine that knows the answers: the first `passes[prompt]` of a task's samples are right, the others a wrong number."""

    def __init__(self, chat, domain, tasks, passes):
        self.chat, self.known, self.passes, self.count = chat, {}, passes, {}
        for task in tasks:
            self.known[tuple(start(chat, domain.env(task)).tokens)] = task["prompt"], domain.solution(task)[-1]["content"]

    def generate(self, prompts, max_new_tokens, temperature, seed):
        assert temperature == CONFIG.temperature and set(max_new_tokens) == {8}
        found = []
        for prompt in prompts:
            text, answer = self.known[tuple(prompt)]
            n = self.count[text] = self.count.get(text, 0) + 1
            ids = [*self.chat.encode(answer if n <= self.passes[text] else "999"), self.chat.im_end_id]
            found.append(Completion(ids, [-1.0] * len(ids), True))
        return found


def test_prompts_of_the_band_are_kept(chat):
    """A prompt's pass rate is the share of right samples; kept are those from min to max, both included."""
    domain = make("gcd", GYM)
    tasks = list({t["prompt"]: t for t in map(domain.task, range(10))}.values())
    passes = {task["prompt"]: i % 5 for i, task in enumerate(tasks)}
    kept, dropped = curate(Scripted(chat, domain, tasks, passes), chat, GYM, CONFIG)  # type: ignore[arg-type]
    rates = {task["prompt"]: task["pass_rate"] for task in kept + dropped}
    assert rates == {prompt: n / 4 for prompt, n in passes.items()}
    assert {t["pass_rate"] for t in kept} == {0.25, 0.5, 0.75} and {t["pass_rate"] for t in dropped} == {0.0, 1.0}
    assert all({k: v for k, v in task.items() if k != "pass_rate"} in tasks for task in kept + dropped)


@pytest.mark.parametrize("passes", [0, 4])
def test_no_prompt_in_the_band_is_an_error(chat, passes):
    """All too hard or all too easy: the message names the knobs."""
    domain = make("gcd", GYM)
    tasks = [domain.task(i) for i in range(10)]
    engine = Scripted(chat, domain, tasks, {task["prompt"]: passes for task in tasks})
    with pytest.raises(K2Error, match="curate.min_pass_rate and max_pass_rate"):
        curate(engine, chat, GYM, CONFIG)  # type: ignore[arg-type]
