"""Prompts of moderate difficulty: those that the SFT model passes sometimes (report section 3.2.1). The band is not public."""

from k2.config import CurateConfig, GymConfig
from k2.errors import K2Error
from k2.gym import PASS, Task, make_all
from k2.progress import bar
from k2.rl.rollout import rollout
from k2.serve.engine import Engine
from k2.tokenizer.chat import ChatTokenizer


def curate(engine: Engine, tokenizer: ChatTokenizer, gym: GymConfig, config: CurateConfig) -> tuple[list[Task], list[Task]]:
    """(kept, dropped) tasks, each with its `pass_rate`. K2Error when none is kept: RL would have nothing to learn."""
    kept: list[Task] = []
    dropped: list[Task] = []
    with bar("curate", len(gym.domains) * config.prompts_per_domain, "prompt") as progress:
        for number, (name, domain) in enumerate(make_all(gym).items()):
            tasks = [domain.task(config.seed * config.prompts_per_domain + i) for i in range(config.prompts_per_domain)]
            tasks = list({task["prompt"]: task for task in tasks}.values())
            envs = [domain.env(task) for task in tasks for _ in range(config.samples_per_prompt)]
            budgets = [gym.max_new_tokens[name]] * len(envs)
            episodes = rollout(engine, tokenizer, envs, budgets, config.temperature, seed=config.seed * 100 + number)
            for i, task in enumerate(tasks):
                group = episodes[i * config.samples_per_prompt : (i + 1) * config.samples_per_prompt]
                rate = sum(e.reward >= PASS for e in group) / len(group)
                (kept if config.min_pass_rate <= rate <= config.max_pass_rate else dropped).append({**task, "pass_rate": rate})
            progress.update(config.prompts_per_domain)
    if not kept:
        raise K2Error("no prompt's pass rate lies within curate.min_pass_rate and max_pass_rate; widen them or train SFT longer")
    return kept, dropped
