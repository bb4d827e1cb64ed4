"""What every domain of the gym shares: tasks drawn by seed, one episode as an Env, and the split that keeps evaluation unseen.

    domain = k2.gym.make("chain_sum", params.gym)
    task = domain.task(seed=7)                     # JSON-able
    env = domain.env(task)                         # env.messages, env.tools
    step = env.step({"role": "assistant", "content": "5"})

A task whose seed is below gym.held_out_seed is for training, one from there on for evaluation. The SHA-256 of a task's prompt
decides to which of the two it may belong, so that a held-out question is never trained on, not even by another seed that asks the
same. An episode's reward is the sum of its steps' rewards and lies in [0, 1]; the pass of pass@k is a reward of 1.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from k2.errors import ConfigError

Message = dict[str, Any]  # OpenAI's chat message
Task = dict[str, Any]  # JSON-able: "domain", "seed", "prompt" and what the domain needs to make the episode again

HELD_OUT_SHARE = 0.2  # of all prompts
ATTEMPTS = 1000  # draws of a seed until a prompt of its split comes up
PASS = 1.0 - 1e-6  # rewards are sums of floats


@dataclass
class Step:
    """What the environment answers to an assistant message."""

    messages: list[Message] = field(default_factory=list)  # new observations: tool results, the user's next request
    reward: float = 0.0
    done: bool = True


class Env(ABC):
    """One episode. `messages` is the dialogue so far, `tools` the OpenAI specifications declared to the model."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def step(self, message: Message) -> Step:
        """Take the assistant's message and extend the dialogue by it and the observations. What a model writes never raises."""
        self.messages.append(message)
        step = self.react(message)
        self.messages.extend(step.messages)
        return step

    @abstractmethod
    def react(self, message: Message) -> Step: ...


class Domain(ABC):
    """A family of tasks of one kind."""

    def __init__(self, name: str, held_out_seed: int) -> None:
        self.name, self.held_out_seed = name, held_out_seed

    def task(self, seed: int) -> Task:
        """The task of a seed, from the seed's split. ConfigError if the domain is too small to have both splits."""
        for attempt in range(ATTEMPTS):
            drawn = self.draw(seed, attempt)
            if is_held_out(drawn["prompt"]) == (seed >= self.held_out_seed):
                return {"domain": self.name, "seed": seed, **drawn}
        raise ConfigError(f"params.yaml: gym.domains.{self.name}: too few different tasks to hold some out; widen its ranges")

    @abstractmethod
    def draw(self, seed: int, attempt: int) -> dict[str, Any]:
        """A task of either split with its `prompt`; the pair (seed, attempt) decides all of it."""

    @abstractmethod
    def env(self, task: Task) -> Env: ...

    @abstractmethod
    def solution(self, task: Task) -> list[Message]:
        """A whole dialogue that earns reward 1, for SFT. Its tools are `env(task).tools`."""


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the evaluation split: a property of its text alone."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") < HELD_OUT_SHARE * 2**32
