"""Evaluation: closed forms, fakes whose score is known, and the verifier of tool calls."""

import itertools
import json
import math
from collections import namedtuple
from typing import Any

import pytest
import torch

from k2 import gym
from k2.config import GymConfig
from k2.eval.gym import held_out, level, pass_at_k, summarize, tool_call_accuracy
from k2.eval.latency import latency
from k2.eval.needle import needle_map, retrieve
from k2.rl.rollout import Episode, rollout
from k2.tokenizer import bpe
from k2.tokenizer.chat import ChatTokenizer

Completion = namedtuple("Completion", "ids logprobs finished")
CONFIG = GymConfig(
    domains={
        "chain_sum": {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "tool_use": {"max_turns": 6, "operations": 3, "requests": 2},
    },
    max_new_tokens={"chain_sum": 16, "tool_use": 200},
    held_out_seed=10**6,
)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(bpe.train(["the quick brown fox functions.count add item number 0 1 2 3 = + -"] * 3, 320))


class Script:
    """A policy with the engine's interface that says, of each dialogue (told by its first tokens), the solution's next turn."""

    def __init__(
        self, tokenizer: ChatTokenizer, dialogues: list[tuple[list[dict], list[dict] | None]], spoil=lambda ids: ids
    ) -> None:
        self.lines = {}
        for messages, tools in dialogues:
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt, _ = tokenizer.encode_chat(messages[:i], tools, add_generation_prompt=True)
                    whole, _ = tokenizer.encode_chat(messages[: i + 1], tools)
                    self.lines[tuple(prompt)] = spoil(whole[len(prompt) :])

    def generate(self, prompts, max_new_tokens, temperature, seed, top_p=1.0):
        budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        answers = [self.lines[tuple(prompt)] for prompt in prompts]
        return [Completion(a[:n], [-0.5] * min(n, len(a)), len(a) <= n) for a, n in zip(answers, budgets, strict=True)]


Policy: Any = Script  # has of the engine what is called, not its type


# -- pass@k -----------------------------------------------------------------------------------------------------------------------
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass():
    """The formula equals counting all subsets of size k, for every n, c, k up to 6."""
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets)), (n, c, k)
    with pytest.raises(ValueError, match="at least 5"):
        pass_at_k(4, 1, 5)


def test_summary_of_groups():
    """Two prompts of two samples, one pass: pass@1 a quarter, pass@2 a half; partial credit counts in the reward alone."""
    result = summarize([Episode([], [], reward=r, over_budget=r == 0) for r in (1.0, 0.5, 0.0, 0.0)], samples=2)
    assert (result.pass_at_1, result.pass_at_k, result.reward, result.over_budget) == (0.25, 0.5, 0.375, 0.5)


# -- rollout and gym --------------------------------------------------------------------------------------------------------------
def test_a_policy_that_knows_the_solutions_earns_everything(tokenizer):
    """Through real tokens and environments, solutions pass at 1 in every domain, also dialogues of several requests and calls."""
    dialogues = []
    for domain in gym.make_all(CONFIG).values():
        tasks = [domain.task(CONFIG.held_out_seed + i) for i in range(8)]
        dialogues += [(domain.solution(task), domain.env(task).tools) for task in tasks]
    results = held_out(Policy(tokenizer, dialogues), tokenizer, CONFIG, prompts=8, samples=2, temperature=1.0, seed=0)
    assert set(results) == {"chain_sum", "tool_use"}
    for result in results.values():
        assert (result.pass_at_1, result.reward, result.over_budget, result.episodes) == (1.0, pytest.approx(1.0), 0.0, 16)


def test_an_episode_is_what_was_sampled(tokenizer):
    """Tokens equal the whole dialogue's, the mask marks exactly the assistant's, each of those has a log-probability."""
    domain = gym.make("tool_use", CONFIG)
    task = domain.task(3)
    solution, env = domain.solution(task), domain.env(task)
    (episode,) = rollout(Policy(tokenizer, [(solution, env.tools)]), tokenizer, [env], [200], temperature=1.0, seed=0)
    tokens, mask = tokenizer.encode_chat(solution, env.tools)
    assert (episode.tokens, episode.mask) == (tokens, mask)
    assert len(episode.logprobs) == sum(mask) and episode.messages == solution and not episode.over_budget


@pytest.mark.parametrize("budget", [1, 5, 60])
def test_the_budget_of_a_dialogue_covers_all_its_turns(tokenizer, budget):
    """No more than the budget is sampled, and a dialogue cut by it is marked and earns only what it had earned before."""
    domain = gym.make("tool_use", CONFIG)
    task = domain.task(3)
    env = domain.env(task)
    script = Policy(tokenizer, [(domain.solution(task), env.tools)])
    (episode,) = rollout(script, tokenizer, [env], [budget], temperature=1.0, seed=0)
    assert episode.over_budget and len(episode.logprobs) == sum(episode.mask) <= budget and episode.reward < 1


def test_a_policy_that_babbles_earns_nothing(tokenizer):
    """Answers cut off inside a call's tokens are content: no exception, no reward, no endless dialogue."""
    domain = gym.make("tool_use", CONFIG)
    tasks = [domain.task(i) for i in range(4)]
    script = Policy(
        tokenizer,
        [(domain.solution(task), domain.env(task).tools) for task in tasks],
        spoil=lambda ids: ids[: len(ids) // 2] + [tokenizer.im_end_id],
    )
    envs = [domain.env(task) for task in tasks]
    script.lines = {
        tuple(tokenizer.encode_chat(e.messages, e.tools, True)[0]): line for e, line in zip(envs, script.lines.values())
    }
    for env in envs:
        env.react = lambda message, react=env.react: _last(react(message))  # type: ignore[method-assign]
    assert [episode.reward for episode in rollout(script, tokenizer, envs, [99] * 4, temperature=1.0, seed=0)] == [0.0] * 4


def _last(step: gym.Step) -> gym.Step:
    return gym.Step([], step.reward, done=True)


# -- tool-call accuracy -----------------------------------------------------------------------------------------------------------
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]


def calling(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"functions.{name}:0", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("message", "reached"),
    [
        ({"role": "assistant", "content": "3"}, 0),
        (calling("sub", {"n": 3}), 1),
        (calling("add", {"n": "3"}), 2),
        (calling("add", {"n": 4}), 3),
        (calling("add", {"n": 3}), 4),
    ],
)
def test_levels_of_a_tool_call(message, reached):
    """Parsed, of a declared name, fitting the schema, exact: each call reaches the first levels that hold."""
    assert level(message, calling("add", {"n": 3}), TOOLS) == reached


def test_tool_call_accuracy_is_over_places_and_dialogues(tokenizer):
    """Two dialogues, the second with one wrong call of its two: two of three calls are exact, one of two dialogues."""
    result = {"role": "tool", "tool_call_id": "functions.add:0", "content": "ok"}
    one = [{"role": "user", "content": "a"}, calling("add", {"n": 1}), result, {"role": "assistant", "content": "ok"}]
    two = [{"role": "user", "content": "b"}, calling("add", {"n": 1}), result, calling("add", {"n": 2})]
    said = [*two[:3], calling("add", {"n": 3})]
    script = Policy(tokenizer, [(one, TOOLS), (said, TOOLS)])
    dialogues = [{"messages": one, "tools": TOOLS}, {"messages": two, "tools": TOOLS}]
    accuracy = tool_call_accuracy(script, tokenizer, dialogues, max_new_tokens=100, max_context=1000, seed=0)
    assert accuracy is not None
    assert (accuracy.schema, accuracy.exact, accuracy.dialogues, accuracy.calls) == (1.0, pytest.approx(2 / 3), 0.5, 3)
    assert tool_call_accuracy(script, tokenizer, dialogues, 100, max_context=5, seed=0) is None


# -- needle, latency -----------------------------------------------------------------------------------------------
class PerfectRecall(torch.nn.Module):
    """Predicts what followed the last earlier occurrence of the current token (an induction head), certain of it."""

    def hidden(self, tokens):
        states = torch.full((*tokens.shape, 64), -30.0)
        for row, state in zip(tokens.tolist(), states):
            seen = {}
            for at, token in enumerate(row):
                state[at, seen.get(token, 0)] = 30.0
                if at + 1 < len(row):
                    seen[token] = row[at + 1]
        return states

    def lm_head(self, state):
        return state


def haystack(length: int, depth: float, seed: int) -> tuple[list[int], list[int]]:
    """Filler 0, the needle 7 -> (a, b) at the depth, and 7 again at the end."""
    a, b = 10 + seed % 20, 40 + seed % 20
    filler = length - 6
    before = round(depth * filler)
    return [0] * before + [7, a, b] + [0] * (filler - before) + [7], [a, b]


def test_perfect_recall_finds_every_needle():
    """A model with perfect recall scores 1 with no loss at every length and depth; one that sees nothing scores 0 and ln V."""
    results = list(needle_map(PerfectRecall(), haystack, [16, 64], [0.0, 0.5, 1.0], trials=3, seed=0, batch_tokens=64))
    assert [(r.length, r.depth) for r in results] == [(n, d) for n in (16, 64) for d in (0.0, 0.5, 1.0)]
    assert all(r.accuracy == 1.0 and r.nll < 1e-6 for r in results)
    blind = PerfectRecall()
    blind.hidden = lambda tokens: torch.zeros(*tokens.shape, 64)  # type: ignore[method-assign]
    assert [retrieve(blind, [haystack(16, 0.5, s)])[0] for s in range(3)] == [(False, pytest.approx(math.log(64)))] * 3


def test_latency_is_ordered(tokenizer):
    """Percentiles rise, all figures are positive, and the batch counts every token."""

    class Engine:
        def generate(self, prompts, max_new_tokens, temperature, seed):
            torch.randn(200, 200).matmul(torch.randn(200, 200 * max_new_tokens))  # takes time
            return [Completion([1] * max_new_tokens, [], False) for _ in prompts]

    engine: Any = Engine()
    figures = latency(engine, [1, 2], new_tokens=8, requests=5, batch=4, seed=0)
    assert 0 < figures["first_token_ms_p50"] <= figures["first_token_ms_p90"] <= figures["first_token_ms_p99"]
    assert 0 <= figures["token_ms_p50"] <= figures["token_ms_p99"] and figures["batch_tokens_per_second"] > 0
