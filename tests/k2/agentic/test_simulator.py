import json
import random
from typing import Any

import pytest

from k2.agentic import evolve, real
from k2.agentic.simulator import BUSY, PARTIAL, Simulator

NAMES, FIELDS = ["hall", "desk", "loft"], {"level": int, "power": ["off", "on"]}
STATE = {"lamp": {"hall": {"level": 3, "power": "off"}}}


def lamp(verb: str, *uses: str) -> dict[str, Any]:
    return evolve.specification("smart_home", "lights", "lamp", NAMES, FIELDS, verb, list(uses))


TOOLS = [
    lamp("create"), lamp("create", "level", "power"), lamp("read", "level"), lamp("update", "level"), lamp("delete"), lamp("list"),
    lamp("toggle", "power"), lamp("update", "level", "power"),
]  # fmt: skip


def world(server: real.RealTools, failure_rate: float = 0.0, seed: int = 0, tools: list[dict[str, Any]] = TOOLS) -> Simulator:
    return Simulator(tools, STATE, server, failure_rate, random.Random(seed))


def test_the_state_is_kept_over_the_calls_of_a_dialogue(server: real.RealTools) -> None:
    """Create, read, update, delete, list and toggle as their names say, edges refused; the starting state is not touched."""
    simulator = world(server)
    for name, arguments, result in [
        ("get_lamp_level", {"lamp": "hall"}, "3"),
        ("set_lamp_level", {"lamp": "hall", "level": 7}, "ok"),
        ("get_lamp_level", {"lamp": "hall"}, "7"),
        ("set_lamp_level", {"lamp": "hall", "level": 12}, "error: level above 9"),
        ("set_lamp_level", {"lamp": "hall", "level": -1}, "error: level below 0"),
        ("get_lamp_level", {"lamp": "hall"}, "7"),
        ("flip_lamp_power", {"lamp": "hall"}, "on"),
        ("flip_lamp_power", {"lamp": "hall"}, "off"),
        ("new_lamp", {"lamp": "hall"}, "error: lamp hall exists"),
        ("new_lamp", {"lamp": "desk"}, "ok"),
        ("get_lamp_level", {"lamp": "desk"}, "not set"),
        ("list_lamp", {}, "desk, hall"),
        ("drop_lamp", {"lamp": "hall"}, "ok"),
        ("drop_lamp", {"lamp": "hall"}, "error: no lamp hall"),
        ("set_lamp_level_power", {"lamp": "desk", "level": 1, "power": "loud"}, "error: no power loud"),
        ("drop_lamp", {"lamp": "desk"}, "ok"),
        ("list_lamp", {}, "none"),
    ]:
        assert simulator.call(name, json.dumps(arguments)) == result, name
    assert simulator.state == {"lamp": {}} and STATE["lamp"]["hall"]["level"] == 3


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("get_lamp", '{"lamp": "hall"}', "no such tool"),
        ("get_lamp_level", '{"lamp": "hall"', "not JSON"),
        ("get_lamp_level", '["hall"]', "not an object"),
        ("get_lamp_level", "{}", "'lamp' is a required property"),
        ("get_lamp_level", '{"lamp": 3}', "is not of type 'string'"),
        ("get_lamp_level", '{"lamp": "hall", "level": 3}', "unknown level"),
        ("set_lamp_level", '{"lamp": "hall", "level": "3"}', "is not of type 'integer'"),
    ],
)
def test_what_the_declaration_does_not_allow_changes_nothing(server: real.RealTools, name: str, arguments: str, words: str) -> None:
    simulator = world(server)
    result = simulator.call(name, arguments)
    assert result.startswith("error: ") and words in result
    assert simulator.state == STATE


def test_failures_come_at_the_rate_asked_for_and_change_nothing(server: real.RealTools) -> None:
    """Of 4000 calls at rate 0.3, within four standard deviations (0.029); none at rate 0, all at rate 1."""
    simulator = world(server, 0.3, seed=5)
    results = [simulator.call("get_lamp_level", '{"lamp": "hall"}') for _ in range(4000)]
    assert abs(results.count(BUSY) / 4000 - 0.3) < 0.029 and set(results) == {BUSY, "3"}
    always = world(server, 1.0)
    assert always.call("set_lamp_level", '{"lamp": "hall", "level": 7}') == BUSY and always.state == STATE


@pytest.mark.parametrize("name", ["new_lamp_level_power", "set_lamp_level_power"])
def test_a_partial_failure_does_a_part_and_the_same_call_again_completes_it(server: real.RealTools, name: str) -> None:
    lamp_name = "hall" if name.startswith("set") else "desk"
    call = json.dumps({"lamp": lamp_name, "level": 9, "power": "on"})
    for seed in range(99):
        simulator = world(server, 1.0, seed)
        if simulator.call(name, call).startswith(PARTIAL):
            break
    else:
        raise AssertionError("no partial failure in 99 seeds")
    assert simulator.state["lamp"][lamp_name] == {"level": 9} | ({"power": "off"} if lamp_name == "hall" else {})
    simulator.failure_rate = 0.0
    assert simulator.call(name, call) == "ok"
    assert simulator.state["lamp"][lamp_name] == {"level": 9, "power": "on"}


def test_real_tools_run_for_real_and_start_afresh(server: real.RealTools) -> None:
    notes = [tool for tool in server.specifications if tool["application"] == "notes"]
    first = Simulator(notes, {}, server, 0.0, random.Random(0))
    assert first.call("put_note", '{"key": "sun", "value": "milk"}') == "ok"
    assert first.call("get_note", '{"key": "sun"}') == "milk"
    second = Simulator(notes, {}, server, 0.0, random.Random(0))
    assert second.call("get_note", '{"key": "sun"}') == "error: no note sun"
