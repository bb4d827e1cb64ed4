"""What each stage's model says: continuations of fixed texts, and played dialogues."""

from typing import TYPE_CHECKING, Any

from k2 import gym
from k2.config import GymConfig
from k2.rl.rollout import rollout

if TYPE_CHECKING:
    from k2.serve.engine import Engine
    from k2.tokenizer.chat import ChatTokenizer

TEXTS = ["Python is", "def read(path):\n", "The list is sorted"]


def continuations(
    engine: "Engine", tokenizer: "ChatTokenizer", max_new_tokens: int, temperature: float, seed: int
) -> list[dict[str, Any]]:
    """A continuation of each of TEXTS."""
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in TEXTS]
    completions = engine.generate(prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    return [
        {"kind": "text", "prompt": text, "text": tokenizer.decode([i for i in done.ids if i != tokenizer.eos_id])}
        for text, done in zip(TEXTS, completions, strict=True)
    ]


def dialogues(
    engine: "Engine", tokenizer: "ChatTokenizer", config: GymConfig, temperature: float, seed: int
) -> list[dict[str, Any]]:
    """One held-out task of each domain of the gym, as it was played."""
    domains = gym.make_all(config)
    tasks = [domain.task(config.held_out_seed + seed) for domain in domains.values()]
    envs = [domain.env(task) for domain, task in zip(domains.values(), tasks)]
    episodes = rollout(engine, tokenizer, envs, [config.max_new_tokens[name] for name in domains], temperature, seed)
    return [
        {"kind": "dialogue", "domain": name, "messages": said(tokenizer, episode), "reward": round(episode.reward, 3)}
        for name, episode in zip(domains, episodes, strict=True)
    ]


def said(tokenizer: "ChatTokenizer", episode: Any) -> list[dict[str, Any]]:
    """The messages; an answer that ran out of budget is there too, as content."""
    if not episode.over_budget or episode.messages[-1]["role"] == "assistant":
        return episode.messages
    begin = len(episode.mask) - next((i for i, sampled in enumerate(reversed(episode.mask)) if not sampled), len(episode.mask))
    return [*episode.messages, {"role": "assistant", "content": tokenizer.decode(episode.tokens[begin:])}]
