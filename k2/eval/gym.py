"""pass@1 and pass@k on the gym's held-out tasks, and how often tool calls are the right ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k2 import gym
from k2.config import GymConfig
from k2.gym.tool_use import parse_call
from k2.rl.rollout import Episode, rollout

if TYPE_CHECKING:
    from k2.serve.engine import Engine
    from k2.tokenizer.chat import ChatTokenizer


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased probability that at least one of k samples passes, from `passed` among `samples`: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1, as a product so that no binomial overflows. Needs k <= samples.
    """
    if not 0 < k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {samples}")
    miss = 1.0
    for i in range(samples - passed + 1, samples + 1):
        miss *= max(0.0, 1.0 - k / i)
    return 1.0 - miss


@dataclass(frozen=True)
class DomainResult:
    """Held-out results of one domain. All but `episodes` are means in [0, 1]."""

    pass_at_1: float
    pass_at_k: float
    reward: float
    over_budget: float
    episodes: int


def held_out(
    engine: "Engine",
    tokenizer: "ChatTokenizer",
    config: GymConfig,
    prompts: int,
    samples: int,
    temperature: float,
    seed: int,
) -> dict[str, DomainResult]:
    """Play `samples` episodes of each of `prompts` held-out tasks of each domain. k is `samples`."""
    results = {}
    for name, domain in gym.make_all(config).items():
        tasks = [domain.task(config.held_out_seed + i) for i in range(prompts)]
        envs = [domain.env(task) for task in tasks for _ in range(samples)]
        episodes = rollout(engine, tokenizer, envs, [config.max_new_tokens[name]] * len(envs), temperature, seed)
        results[name] = summarize(episodes, samples)
    return results


def summarize(episodes: Sequence[Episode], samples: int) -> DomainResult:
    """Means over prompts; the episodes of a prompt stand together, `samples` of each."""
    groups = [episodes[i : i + samples] for i in range(0, len(episodes), samples)]
    passed = [sum(episode.reward >= gym.PASS for episode in group) for group in groups]
    return DomainResult(
        pass_at_1=sum(pass_at_k(samples, c, 1) for c in passed) / len(groups),
        pass_at_k=sum(pass_at_k(samples, c, samples) for c in passed) / len(groups),
        reward=sum(episode.reward for episode in episodes) / len(episodes),
        over_budget=sum(episode.over_budget for episode in episodes) / len(episodes),
        episodes=len(episodes),
    )


# -- tool-call accuracy -----------------------------------------------------------------------------------------------------------
LEVELS = ["parsed", "declared", "schema", "exact"]  # each includes the ones before


@dataclass(frozen=True)
class ToolCallResult:
    """Shares in [0, 1]. `dialogues`: of dialogues of which every call is exact; the others: of the assistant turns with calls."""

    dialogues: float
    parsed: float
    declared: float
    schema: float
    exact: float
    calls: int


def tool_call_accuracy(
    engine: "Engine",
    tokenizer: "ChatTokenizer",
    dialogues: Sequence[dict[str, Any]],
    max_new_tokens: int,
    max_context: int,
    seed: int,
) -> ToolCallResult | None:
    """Greedy calls at every place of the dialogues where the assistant called a tool, the true dialogue before it given.

    Dialogues are those of data/trajectories: "messages" and "tools". Places whose prompt is over `max_context` tokens are left out;
    None if no place is left.
    """
    places = []  # (dialogue, index of the assistant's message, prompt)
    for d, dialogue in enumerate(dialogues):
        for i, message in enumerate(dialogue["messages"]):
            if message["role"] == "assistant" and message.get("tool_calls"):
                prompt, _ = tokenizer.encode_chat(dialogue["messages"][:i], dialogue["tools"], add_generation_prompt=True)
                if len(prompt) <= max_context:
                    places.append((d, i, prompt))
    if not places:
        return None
    completions = engine.generate([prompt for _, _, prompt in places], max_new_tokens=max_new_tokens, temperature=0.0, seed=seed)
    reached = [
        level(tokenizer.parse_assistant(completion.ids), dialogues[d]["messages"][i], dialogues[d]["tools"])
        for (d, i, _), completion in zip(places, completions, strict=True)
    ]
    whole: dict[int, bool] = {}
    for (d, _, _), got in zip(places, reached):
        whole[d] = whole.get(d, True) and got == len(LEVELS)
    shares = {name: sum(got > at for got in reached) / len(reached) for at, name in enumerate(LEVELS)}
    return ToolCallResult(dialogues=sum(whole.values()) / len(whole), calls=len(reached), **shares)


def level(message: dict[str, Any], expected: dict[str, Any], tools: list[dict[str, Any]]) -> int:
    """How many of LEVELS an assistant message reaches against the expected one: all of its calls must."""
    calls = message.get("tool_calls") or []
    if not calls:
        return 0
    declared = {tool["function"]["name"] for tool in tools}
    if any(call["function"]["name"] not in declared for call in calls):
        return 1
    parsed = [parse_call(call, tools) for call in calls]
    if any(error for _, _, error in parsed):
        return 2
    wanted = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in expected["tool_calls"]]
    return 4 if [(name, given) for name, given, _ in parsed] == wanted else 3
