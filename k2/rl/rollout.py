"""Episodes: many dialogues at once between the policy, through the rollout engine, and the environments of the gym.

Training and evaluation share this driver. Each turn, all dialogues that still go on are one call of `engine.generate`. What is
trained on is what was sampled: an episode's tokens grow by the engine's own tokens, never by a message that was rendered and
tokenised again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k2.gym.env import Env, Message

if TYPE_CHECKING:
    from k2.serve.engine import Engine
    from k2.tokenizer.chat import ChatTokenizer


@dataclass
class Episode:
    """One dialogue as tokens, and what it earned."""

    tokens: list[int]  # prompt, sampled answers and observations, as the policy saw them
    mask: list[bool]  # of `tokens`: sampled by the policy
    logprobs: list[float] = field(default_factory=list)  # nats, one for each sampled token, under the policy that sampled it
    reward: float = 0.0  # sum over the steps, in [0, 1]
    over_budget: bool = False  # ran out of its token budget before the end of an answer or of the dialogue
    messages: list[Message] = field(default_factory=list)

    @property
    def response_tokens(self) -> int:
        return len(self.logprobs)


def rollout(
    engine: "Engine",
    tokenizer: "ChatTokenizer",
    envs: Sequence[Env],
    max_new_tokens: Sequence[int],
    temperature: float,
    seed: int,
) -> list[Episode]:
    """Play each environment to its end and return one episode each, in order.

    `max_new_tokens` is each dialogue's budget of sampled tokens over all of its turns (budget control, report section 3.2.3). An
    answer that does not end within it is not given to the environment: it earns nothing and the episode is marked `over_budget`.
    """
    episodes = [start(tokenizer, env) for env in envs]
    active = list(range(len(envs)))
    turn = 0
    while active:
        budgets = [max_new_tokens[i] - episodes[i].response_tokens for i in active]
        completions = engine.generate(
            [episodes[i].tokens for i in active], max_new_tokens=budgets, temperature=temperature, seed=seed * 1000 + turn
        )
        going = []
        for i, completion in zip(active, completions, strict=True):
            episode = episodes[i]
            _extend(episode, completion.ids, sampled=True)
            episode.logprobs += completion.logprobs
            if not completion.finished:
                episode.over_budget = True
            elif not advance(episode, envs[i], tokenizer, completion.ids):
                if episode.response_tokens < max_new_tokens[i]:
                    going.append(i)
                else:
                    episode.over_budget = True
        active, turn = going, turn + 1
    for episode, env in zip(episodes, envs):
        episode.messages = env.messages
    return episodes


def start(tokenizer: "ChatTokenizer", env: Env) -> Episode:
    """An episode that holds the environment's first messages and the beginning of the assistant's turn."""
    tokens, _ = tokenizer.encode_chat(env.messages, env.tools, add_generation_prompt=True)
    return Episode(tokens, [False] * len(tokens))


def advance(episode: Episode, env: Env, tokenizer: "ChatTokenizer", answer: list[int]) -> bool:
    """Give the environment an answer and append what it replies. Returns whether the dialogue is over."""
    step = env.step(tokenizer.parse_assistant(answer))
    episode.reward += step.reward
    if not step.done:
        _extend(episode, observation(tokenizer, env, step.messages), sampled=False)
    return step.done


def observation(tokenizer: "ChatTokenizer", env: Env, new: list[Message]) -> list[int]:
    """Tokens of the last messages `new` of env.messages and of the beginning of the next answer.

    Rendered within the whole dialogue and cut off behind the assistant's <|im_end|>, for a template may look back; messages end in
    a special token, so the cut falls between tokens.
    """
    before, _ = tokenizer.encode_chat(env.messages[: len(env.messages) - len(new)], env.tools)
    after, _ = tokenizer.encode_chat(env.messages, env.tools, add_generation_prompt=True)
    assert after[: len(before)] == before, "the chat template changes earlier messages when later ones arrive"
    return after[len(before) :]


def _extend(episode: Episode, tokens: list[int], sampled: bool) -> None:
    episode.tokens.extend(tokens)
    episode.mask.extend([sampled] * len(tokens))
