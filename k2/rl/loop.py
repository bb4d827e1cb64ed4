"""The RL loop: roll out groups with the previous policy, update once, push the weights (report sections 3.2.3, 3.3)."""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from k2.config import GymConfig, RLConfig
from k2.errors import K2Error
from k2.gym import Task, make_all
from k2.optim.schedule import wsd
from k2.progress import bar
from k2.rl.objective import Advantages, advantages, answer_logprobs, policy_loss, shaped_reward, temperature
from k2.rl.rollout import Episode, rollout
from k2.serve.engine import Engine
from k2.tokenizer.chat import ChatTokenizer
from k2.train.batches import DialogueBatches, pack
from k2.train.loop import Rows, Run
from k2.train.state import load_state, save_state
from k2.train.trainer import Trainer

MICRO_BATCH_TOKENS = 8192
SOLVED = 0.995  # mean reward from which a step whose groups are all equal means success


class RL:
    """One policy in training: `trainer` learns, `engine` samples, `push(version)` copies the weights from one to the other."""

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        tokenizer: ChatTokenizer,
        gym: GymConfig,
        config: RLConfig,
        push: Callable[[int], None],
    ) -> None:
        self.trainer, self.engine, self.tokenizer, self.gym, self.config, self.push = trainer, engine, tokenizer, gym, config, push
        self.domains = make_all(gym)

    def train(self, prompts: list[Task], ptx: DialogueBatches, run: Run) -> Rows:
        """config.steps iterations over `prompts` in random order; a row of statistics for each."""
        config = self.config
        rows, first = self._resume(run)
        saved = time.monotonic()
        with bar(run.name, config.steps, "step", initial=first) as progress:
            for step in range(first, config.steps):
                row = self._iteration(step, self._prompts(prompts, step), ptx)
                if row is None:
                    print(f"{run.name}: every answer is right after {step} steps; nothing is left to learn from these prompts")
                    if "rl/held_out" not in rows[-1]:
                        measured = self.held_out()
                        rows[-1] |= measured
                        run.log(step, measured)
                    break
                if (step + 1) % config.held_out_every == 0 or step + 1 == config.steps:
                    row |= self.held_out()
                rows.append({"step": float(step + 1), **row})
                run.log(step + 1, row)
                progress.set_postfix_str(f"reward {row['rl/reward']:.3f}", refresh=False)
                progress.update(1)
                if time.monotonic() - saved > run.checkpoint_seconds and step + 1 < config.steps:
                    save_state(run.resume_folder, step + 1, self.trainer.state(), {"rows": rows})
                    saved = time.monotonic()
        return rows

    def held_out(self) -> dict[str, float]:
        """Mean reward in percent of the held-out tasks, sampled from the policy itself at temperature 1: all domains and each."""
        tasks = [d.task(self.gym.held_out_seed + i) for d in self.domains.values() for i in range(self.config.held_out_prompts)]
        episodes = self._rollout(tasks, 1.0, seed=self.config.seed)
        return _by_domain("rl/held_out", tasks, [100 * e.reward for e in episodes])

    def _resume(self, run: Run) -> tuple[Rows, int]:
        state = load_state(run.resume_folder)
        if state is None:
            start = {"step": 0.0, **self.held_out()}
            run.log(0, {k: v for k, v in start.items() if k != "step"})
            return [start], 0
        step, tensors, extra = state
        self.trainer.load_state(tensors)
        self.push(step)
        print(f"{run.name}: resuming after step {step}")
        for row in extra["rows"]:
            run.log(int(row["step"]), {k: v for k, v in row.items() if k != "step"})
        return extra["rows"], step

    def _prompts(self, prompts: list[Task], step: int) -> list[Task]:
        """The step's prompts: the domains in turn, each domain's in a new random order every epoch."""
        by: dict[str, list[Task]] = {}
        for task in prompts:
            by.setdefault(task["domain"], []).append(task)
        domains, chosen = list(by.values()), []
        for i in range(step * self.config.prompts_per_step, (step + 1) * self.config.prompts_per_step):
            domain = domains[i % len(domains)]
            epoch, place = divmod(i // len(domains), len(domain))
            order = np.random.default_rng([self.config.seed, i % len(domains), epoch]).permutation(len(domain))
            chosen.append(domain[order[place]])
        return chosen

    def _rollout(self, tasks: list[Task], heat: float, seed: int) -> list[Episode]:
        envs = [self.domains[task["domain"]].env(task) for task in tasks]
        budgets = [self.gym.max_new_tokens[task["domain"]] for task in tasks]
        return rollout(self.engine, self.tokenizer, envs, budgets, heat, seed)

    def _iteration(self, step: int, tasks: list[Task], ptx: DialogueBatches) -> dict[str, float] | None:
        config, K = self.config, self.config.samples_per_prompt
        heat = temperature(step, config.steps, config.temperature, config.final_temperature)
        start = time.perf_counter()
        tasks = [task for task in tasks for _ in range(K)]
        episodes = self._rollout(tasks, heat, seed=config.seed * 1_000_003 + step + 1)
        rollout_seconds = time.perf_counter() - start
        shaped = [shaped_reward(e.reward, e.over_budget, config.over_budget_penalty) for e in episodes]
        groups = advantages(torch.tensor(shaped).view(-1, K))
        mean = sum(e.reward for e in episodes) / len(episodes)
        if not groups.live.any():
            if mean > SOLVED:
                return None
            raise K2Error(
                f"rl step {step + 1}: in each of {len(groups.live)} groups all {K} answers earn the same (mean reward {mean:.2f}):"
                " nothing to learn from; widen curate's pass-rate band, raise rl.samples_per_prompt or train SFT longer"
            )
        gaps: list[float] = []
        lr = wsd(step + 1, config.steps, config.optim)
        row = self.trainer.step(self._losses(episodes, groups, ptx.step(step), gaps), lr)
        trained = time.perf_counter()
        self.push(step + 1)
        return {
            "rl/reward": mean,
            **_by_domain("rl/reward", tasks, [e.reward for e in episodes]),
            "rl/loss": row.pop("train/loss"),
            "rl/dead_groups": float((~groups.live).sum()),
            "rl/group_spread": groups.group_spread,
            "rl/batch_spread": groups.batch_spread,
            "rl/logprob_gap": sum(gaps) / len(gaps),
            "rl/temperature": heat,
            "rl/response_tokens": sum(e.response_tokens for e in episodes) / len(episodes),
            "rl/over_budget": sum(e.over_budget for e in episodes) / len(episodes),
            "rl/rollout_seconds": rollout_seconds,
            "rl/sync_seconds": time.perf_counter() - trained,
            "rl/step_seconds": time.perf_counter() - start,
            "optim/lr": lr,
            **row,
        }

    def _losses(self, episodes: list[Episode], groups: Advantages, ptx: list, gaps: list[float]) -> Iterator[Tensor]:
        """Micro-batch losses whose sum is L_RL / (2 tau) + ptx_weight L_PTX. Dropped groups count in the mean, as zero."""
        K = self.config.samples_per_prompt
        used = [i for i in range(len(episodes)) if groups.live[i // K]]
        used.sort(key=lambda i: len(episodes[i].tokens))  # similar lengths together: attention pads a micro-batch to its longest
        for part in _chunks(used, episodes):
            chosen = [episodes[i] for i in part]
            logprob, gap = self._logprobs(chosen)
            gaps.append(gap)
            old = torch.tensor([sum(e.logprobs) for e in chosen], device=logprob.device)
            advantage = groups.values.flatten()[part].to(logprob.device)
            yield policy_loss(advantage, logprob, old, self.config.tau) / len(episodes)
        if self.config.ptx_weight and ptx:
            total = sum(float(batch.weights.sum()) for batch in ptx)
            for batch in ptx:
                yield self.config.ptx_weight * self.trainer.nll(batch, 1 / total)

    def _logprobs(self, episodes: list[Episode]) -> tuple[Tensor, float]:
        """(S,) log-probabilities of the answers under the policy in training; mean |difference| a token to the engine's."""
        (batch,) = pack([(e.tokens, e.mask) for e in episodes], math.inf)  # type: ignore[arg-type]
        device, model = self.trainer.device, self.trainer.model
        hidden = model.hidden(batch.inputs.to(device), batch.packing.to(device))[0]  # type: ignore[union-attr]
        chosen = batch.weights[0].bool().to(device)
        logits = model.lm_head(hidden[chosen]).float()
        logprob = -F.cross_entropy(logits, batch.targets[0].to(device)[chosen], reduction="none")
        sample = torch.arange(len(episodes)).repeat_interleave(torch.tensor([e.response_tokens for e in episodes])).to(device)
        engine = torch.tensor([p for e in episodes for p in e.logprobs], device=device)
        gap = (logprob.detach() - engine).abs().mean().item()
        return answer_logprobs(logprob, sample, len(episodes)), gap


def _chunks(indices: list[int], episodes: list[Episode]) -> Iterator[list[int]]:
    part: list[int] = []
    tokens = 0
    for i in indices:
        if part and tokens + len(episodes[i].tokens) > MICRO_BATCH_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(i)
        tokens += len(episodes[i].tokens)
    if part:
        yield part


def _by_domain(name: str, tasks: list[Task], values: list[float]) -> dict[str, float]:
    """Mean of all values under `name`, and of each domain's under name_<domain>."""
    by: dict[str, list[float]] = {}
    for task, value in zip(tasks, values, strict=True):
        by.setdefault(f"{name}_{task['domain']}", []).append(value)
    return {name: sum(values) / len(values)} | {key: sum(v) / len(v) for key, v in by.items()}
