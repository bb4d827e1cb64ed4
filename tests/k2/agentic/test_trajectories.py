import copy
import json
import random
from typing import Any

import pytest

from k2.agentic import judge, real, trajectories
from k2.agentic.policy import MISTAKES, Expert
from k2.agentic.simulator import Simulator
from k2.agentic.tasks import LEVELS, Task, TaskMaker
from k2.config import TrajectoriesConfig
from k2.errors import K2Error

Played = tuple[Task, list[dict[str, Any]], Simulator, Expert]


@pytest.fixture(scope="session")
def maker(tools: list[dict[str, Any]], server: real.RealTools) -> TaskMaker:
    return TaskMaker(tools, server)


def play(
    maker: TaskMaker, seed: int, mistake: str | None = None, rate: float = 0.0, level: str | None = None, turns: int = 20
) -> Played:
    rng = random.Random(seed)
    task = maker.draw(rng, level)
    simulator = Simulator(task.tools, task.state, maker.real, rate, rng)
    expert = Expert(task, mistake, rng)
    return task, trajectories.converse(task, expert, simulator, turns), simulator, expert


def verdict(played: Played) -> judge.Verdict:
    task, messages, simulator, _ = played
    return judge.judge(messages, task.tools, task.rubric(), simulator.state)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_expert_passes_at_every_level_of_complexity(maker: TaskMaker, rate: float) -> None:
    """Failures are retried until they succeed when there are turns enough, so that nothing right is thrown away."""
    for level in LEVELS:
        for seed in range(60):
            result = verdict(play(maker, seed, rate=rate, level=level))
            assert result.passed, (level, seed, result)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_found(maker: TaskMaker, mistake: str) -> None:
    """Whenever the policy did err, the judge rejects, whatever the level."""
    made = 0
    for seed in range(300):
        played = play(maker, seed, mistake, rate=0.3 if mistake == "gives_up" else 0.0)
        if played[3].made:
            made += 1
            assert not verdict(played).passed, (seed, played[1])
    assert made > 20


def test_a_passed_dialogue_that_is_changed_anywhere_fails(maker: TaskMaker) -> None:
    """The judge looks at the dialogue itself: another argument, a dropped call, another answer, another state, a missing end."""
    for seed in range(40):
        task, messages, simulator, _ = play(maker, seed, level="chain")

        def judged(changed: list[dict[str, Any]], state: Any = None) -> judge.Verdict:
            return judge.judge(changed, task.tools, task.rubric(), simulator.state if state is None else state)  # noqa: B023

        assert judged(messages).passed
        at = next(i for i, message in enumerate(messages) if message.get("tool_calls"))
        for change in (
            {"function": {"name": "unknown", "arguments": "{}"}},
            {"function": {"name": task.tools[0]["name"], "arguments": "{"}},
        ):
            changed = copy.deepcopy(messages)
            changed[at]["tool_calls"][0] |= change
            assert judged(changed).reason == "invalid call"
        assert judged(messages[:at] + messages[at + 2 :]).reason == "missing call"
        silent = copy.deepcopy(messages)
        silent[-1]["content"] = "I do not know."
        assert judged(silent).reason == "wrong answer"
        assert judged(messages[:-1]).reason == "unfinished"
        assert judged(messages, {"other": {}}).reason == "wrong state"


def test_a_closing_answer_must_say_the_very_value() -> None:
    assert judge.mentions("It is 5.", "5") and judge.mentions("SORRY, no lamp hall.", "no lamp hall")
    assert not judge.mentions("It is 15.", "5") and not judge.mentions("It is on", "o")


def test_dialogues_are_openai_messages_with_k2s_call_ids(maker: TaskMaker) -> None:
    """Ids functions.NAME:COUNTER, counted over the dialogue; every call is answered once, in order; JSON arguments."""
    parallel = chained = 0
    for seed in range(300):
        _, messages, _, _ = play(maker, seed, rate=0.2)
        calls = [call for message in messages for call in message.get("tool_calls") or []]
        assert [call["id"] for call in calls] == [f"functions.{call['function']['name']}:{i}" for i, call in enumerate(calls)]
        assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [call["id"] for call in calls]
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        assert [message["role"] for message in messages[:2]] == ["system", "user"] and messages[-1]["role"] == "assistant"
        parallel += any(len(message.get("tool_calls") or []) > 1 for message in messages)
        chained += sum(message["role"] == "user" for message in messages) > 1
    assert parallel > 20 and chained > 60


def test_synthesis_parts_train_validation_and_rejected(tools: list[dict[str, Any]]) -> None:
    """The same seed, the same data. Tools of held-out applications are in no training dialogue, nor is a held-out task."""
    config = TrajectoriesConfig(dialogues=500, max_turns=6, failure_rate=0.1, seed=0)
    data = trajectories.synthesise(tools, config)
    assert data == trajectories.synthesise(tools, config)
    assert len(data.train) + len(data.validation) + len(data.rejected) + data.duplicates == 500

    def words(record: dict[str, Any]) -> str:
        return json.dumps([record["tools"], [m["content"] for m in record["messages"] if m["role"] == "user"]])

    trained_tools = {tool["function"]["name"] for record in data.train for tool in record["tools"]}
    by_split = {split: [r for r in data.validation if r["held_out"] == split] for split in ("tool", "task")}
    assert by_split["tool"] and by_split["task"]
    assert not trained_tools & {tool["function"]["name"] for record in by_split["tool"] for tool in record["tools"]}
    assert not {words(record) for record in data.train} & {words(record) for record in data.validation}
    assert all(not record["verdict"]["passed"] and record["verdict"]["reason"] for record in data.rejected)
    figures = trajectories.summary(data)
    assert figures["rejected"] == sum(figures["rejected_by_reason"].values()) > 20
    assert figures["kept"] == sum(figures["kept_by_level"].values()) and set(figures["kept_by_level"]) == set(LEVELS)
    assert 0.05 < figures["no_call_share"] < 0.4 and 0.8 < figures["pass_rate"] < 0.97


def test_a_language_model_may_reject_what_the_program_passed(tools: list[dict[str, Any]]) -> None:
    """Its FAIL moves a dialogue to the rejected with its words; it sees the rubric and the dialogue."""

    class Judge:
        tokens = 0

        def generate(self, chats, max_new_tokens, temperature, top_p, seed, progress=lambda n: None) -> list[str]:
            assert all("rubric" in chat[1]["content"] and "messages" not in chat[0]["content"] for chat in chats)
            return ["FAIL: unclear" if i % 2 else "PASS" for i in range(len(chats))]

    config = TrajectoriesConfig(dialogues=60, max_turns=6, failure_rate=0.0, seed=0)
    alone, both = trajectories.synthesise(tools, config), trajectories.synthesise(tools, config, Judge())
    kept = len(alone.train) + len(alone.validation)
    refused = [record for record in both.rejected if record["verdict"]["reason"] == "model's verdict"]
    assert len(refused) == kept // 2 and len(both.train) + len(both.validation) == kept - kept // 2
    assert refused[0]["verdict"]["detail"] == "FAIL: unclear"


def test_no_tools_is_one_clear_line() -> None:
    with pytest.raises(K2Error, match="tools.json: no tools"):
        trajectories.synthesise([], TrajectoriesConfig(1, 1, 0.0, 0))
