"""The gym's domains: solvable, strict, split by prompt, never raising on what a model writes."""

import json

import pytest

from k2 import gym
from k2.config import GymConfig, load_params
from k2.errors import ConfigError
from k2.gym.env import is_held_out

HELD_OUT = 10**6
SORT_753 = {"original_numbers": ["7.0", "3.0", "5.0"], "direction": "ascending"}
DOMAINS = {
    "chain_sum": {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "long_sum": {"dataset": "chain_sum", "min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "letter_counting": {"dataset": "letter_counting", "min_words": 1, "max_words": 2},
    "number_sorting": {"dataset": "number_sorting", "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9},
    "spell_backward": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 4},
    "gcd": {"dataset": "gcd", "max_value": 20},
    "products": {"dataset": "products"},  # asked in the library's own words
    "tool_use": {"max_turns": 6, "items": 12, "max_quantity": 9, "operations": 3, "requests": 3},
}


def domain(name: str, **settings) -> gym.Domain:
    return gym.make(name, GymConfig(domains={name: settings or DOMAINS[name]}, max_new_tokens={}, held_out_seed=HELD_OUT))


def say(content: str) -> dict:
    return {"role": "assistant", "content": content}


def call(name: str, arguments, number: int = 0) -> dict:
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    calls = [{"id": f"functions.{name}:{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("name", DOMAINS)
def test_solutions_earn_full_reward(name):
    """solution(task) through env.step sums to reward 1 and ends the episode, for 200 seeds of both splits."""
    where = domain(name)
    for seed in [*range(100), *range(HELD_OUT, HELD_OUT + 100)]:
        task = json.loads(json.dumps(where.task(seed)))  # what curate stores
        solution, env, reward, step = where.solution(task), where.env(task), 0.0, None
        for message in solution:
            if message["role"] == "assistant":
                assert step is None or not step.done
                step = env.step(message)
                reward += step.reward
        assert step is not None and step.done and reward == pytest.approx(1.0)
        assert env.messages == solution


@pytest.mark.parametrize("name", DOMAINS)
def test_no_held_out_prompt_is_ever_trained_on(name):
    """Training seeds and evaluation seeds share no prompt, though the task spaces are small enough to repeat."""
    where = domain(name)
    train = {where.task(seed)["prompt"] for seed in range(400)}
    held_out = {where.task(seed)["prompt"] for seed in range(HELD_OUT, HELD_OUT + 100)}
    assert len(train) > 20 and len(held_out) > 5 and not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


def test_a_seed_is_a_task():
    """The same seed makes the same task in another instance of the domain; another seed makes other tasks."""
    for name in DOMAINS:
        tasks = [domain(name).task(seed) for seed in range(20)]
        assert tasks == [domain(name).task(seed) for seed in range(20)]
        assert len({task["prompt"] for task in tasks}) > 10


@pytest.mark.parametrize(
    ("name", "metadata", "answer", "content", "reward"),
    [
        ("chain_sum", {"expression": "3 - 5"}, "-2", "-2", 1.0),
        ("chain_sum", {"expression": "3 - 5"}, "-2", "2", 0.0),
        ("chain_sum", {"expression": "3 - 5"}, "-2", "it is -2", 0.0),
        ("chain_sum", {"expression": "3 - 5"}, "-2", "3 - 5 = -2 Answer: -2", 1.0),
        ("chain_sum", {"expression": "3 + 5"}, "8", "18", 0.5),  # the library's partial credit
        ("chain_sum", {"expression": "3 + 5"}, "8", "", 0.0),
        ("number_sorting", SORT_753, "['3.0', '5.0', '7.0']", "3 5 7", 1.0),
        ("number_sorting", SORT_753, "['3.0', '5.0', '7.0']", "7 5 3", 0.0),
        ("number_sorting", SORT_753, "['3.0', '5.0', '7.0']", "3 5 8", 0.0),
        ("number_sorting", SORT_753, "['3.0', '5.0', '7.0']", "[3, 5, 7]", 0.0),
        ("spell_backward", {"word": "Top"}, "poT", "p o t", 1.0),
        ("spell_backward", {"word": "Top"}, "poT", "p o", 2 / 3),  # letters in place
        ("spell_backward", {"word": "Top"}, "poT", "the word is pot", 0.0),
        ("letter_counting", {"span": ["a"], "target_letter": "a"}, "1", "1", 1.0),
        ("letter_counting", {"span": ["a"], "target_letter": "a"}, "1", "one", 0.0),
    ],
)
def test_rewards_of_reasoning_answers(name, metadata, answer, content, reward):
    """Right answers earn 1, wrong ones 0 or the dataset scorer's partial credit, answers in another form 0."""
    task = {"prompt": "?", "entry": {"question": "?", "answer": answer, "metadata": metadata}}
    step = domain(name).env(task).step(say(content))
    assert step.reward == pytest.approx(reward) and step.done


def stepwise(messages: list[dict], number: int = 3) -> list[float]:
    """Rewards of the messages on a store of 4 pens and 1 cup, of which `number` pens are to be added."""
    where = domain("tool_use", max_turns=3, items=4, operations=3)
    request = {"operation": "add", "item": "pen", "number": number, "answer": 4 + number}
    env = where.env({"prompt": "", "stock": {"pen": 4, "cup": 1}, "requests": [request]})
    return [round(env.step(message).reward, 6) for message in messages]


def test_rewards_of_tool_use():
    """0.2 for an allowed call, 0.3 for the right one, 0.5 for the right answer after it on a store in the right state."""
    right = call("add", {"item": "pen", "number": 3})
    assert stepwise([right, say("7")]) == [0.5, 0.5]
    assert stepwise([right, say("8")]) == [0.5, 0.0]
    assert stepwise([say("7")]) == [0.0], "a guess without a call"
    assert stepwise([call("add", {"item": "pen", "number": 2}), say("7")]) == [0.2, 0.0]
    assert stepwise([call("count", {"item": "pen"}), right, say("7")]) == [0.2, 0.3, 0.5], "looking first is allowed"
    assert stepwise([right, right, say("7")]) == [0.5, 0.0, 0.0], "added twice: the store is wrong"


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("add", "{not json", "not JSON"),
        ("add", "[" * 100000, "not JSON"),
        ("add", "[1]", "object"),
        ("add", {"item": "pen"}, "number"),
        ("add", {"item": "pen", "number": "3"}, "integer"),
        ("add", {"item": "pen", "number": 10**20}, "range"),
        ("count", {"item": "dragon"}, "dragon"),
        ("drop_table", {}, "no tool"),
    ],
)
def test_malformed_calls_are_observations(name, arguments, error):
    """A call that cannot be run gives the model an error to read, and the dialogue goes on until max_turns."""
    where = domain("tool_use", max_turns=3, operations=3)
    env = where.env(where.task(0))
    step = env.step(call(name, arguments))
    assert not step.done and step.messages[0]["role"] == "tool" and error in step.messages[0]["content"]
    env.step({"role": "assistant", "content": None, "tool_calls": [{}]})
    assert env.step({"role": "assistant", "content": None, "tool_calls": [{"id": 3, "function": None}]}).done


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("sums", {"dataset": "chain_sums"}, r"gym\.domains\.sums\.dataset.*chain_sum`"),
        ("sums", {"dataset": "chain_sum", "max_term": 3}, r"gym\.domains\.sums\.max_term.*max_terms"),
        ("sums", {"dataset": "chain_sum", "min_terms": 9}, r"gym\.domains\.sums.*max_terms must be"),
        ("sums", {"min_terms": 2}, r"gym\.domains\.sums.*dataset"),
        ("tool_use", {"turns": 4}, r"gym\.domains\.tool_use\.turns.*max_turns"),
        ("tool_use", {"max_turns": "4"}, r"gym\.domains\.tool_use\.max_turns.*integer"),
        ("sums", {"dataset": "chain_sum", "min_terms": 1, "max_terms": 1, "max_digits": 1}, None),
    ],
)
def test_wrong_settings_name_their_key(name, settings, key):
    """A typo in params.yaml's gym section is a ConfigError with the key's path."""
    if key is None:
        domain(name, **settings).task(0)
        return
    with pytest.raises(ConfigError, match=key):
        domain(name, **settings)


def test_a_space_of_one_task_cannot_be_split():
    """A domain that always asks the same has no held-out task: said, not looped over for ever."""
    with pytest.raises(ConfigError, match="too few different tasks"):
        where = domain("tool_use", max_turns=2, items=1, max_quantity=1)
        [where.task(seed) for seed in (0, HELD_OUT)]


def test_params_yaml_is_playable():
    """Every domain that the default params.yaml names can be made, has a token budget and has both splits."""
    config = load_params("params.yaml").gym
    for name, where in gym.make_all(config).items():
        assert where.task(0)["domain"] == name and where.task(config.held_out_seed)["prompt"]
