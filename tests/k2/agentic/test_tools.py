import datetime
import json
import random
from typing import Any

import jsonschema
import pytest

from k2.agentic import catalogue, evolve, real
from k2.agentic.simulator import Simulator
from k2.agentic.tasks import make_request, starting_state
from k2.config import ToolsConfig
from k2.errors import ConfigError


def test_real_tools_are_declared_and_run_by_a_server(server: real.RealTools) -> None:
    """The protocol's own list names every function, with a schema from its signature; calls return what the code computes."""
    assert {tool["name"] for tool in server.specifications} == set(real.REGISTERED) and len(real.REGISTERED) >= 24
    schema = next(tool for tool in server.specifications if tool["name"] == "add_days")["inputSchema"]
    assert {name: kind["type"] for name, kind in schema["properties"].items()} == {"date": "string", "days": "integer"}
    assert schema["required"] == ["date", "days"]
    assert server.call("product", {"a": 6, "b": 7}) == "42"
    assert server.call("add_days", {"date": "2024-02-28", "days": 2}) == str(datetime.date(2024, 3, 1))
    assert server.call("weekday", {"date": "2024-01-31"}) == "Wednesday"
    assert server.call("sort_numbers", {"numbers": "10 9 8"}) == "8 9 10"
    assert server.call("median", {"numbers": "1 2 3 4"}) == "2.5"
    assert server.call("quotient", {"a": 1, "b": 0}) == "error: division by zero"


def test_the_note_store_keeps_its_state_until_it_is_reset(server: real.RealTools) -> None:
    server.reset()
    assert server.call("get_note", {"key": "cat"}) == "error: no note cat"
    assert server.call("put_note", {"key": "cat", "value": "milk"}) == "ok"
    assert server.call("get_note", {"key": "cat"}) == "milk"
    server.reset()
    assert server.call("get_note", {"key": "cat"}) == "error: no note cat"


def test_evolution_covers_the_17_categories_and_20_000_tools() -> None:
    """The report's two numbers are reachable; names are unique; a seed decides all; the first 68 lie in all categories."""
    many = evolve.evolve(20_000, 0)
    assert len({tool["name"] for tool in many}) == 20_000
    assert len(evolve.CATALOGUE) == 17
    few = evolve.evolve(68, 0)  # 17 sets of at most 4
    assert few == many[:68] and few != evolve.evolve(68, 1)
    assert {tool["category"] for tool in few} == set(evolve.CATALOGUE)
    assert {tool["semantics"]["verb"] for tool in few} == {"create", "read", "update", "delete", "list", "toggle"}
    with pytest.raises(ConfigError, match="tools.evolved_tools: 1000000 is more"):
        evolve.evolve(1_000_000, 0)


def test_every_tool_has_a_valid_schema_and_can_be_executed(tools: list[dict[str, Any]], server: real.RealTools) -> None:
    """What the catalogue asks a tool to do is allowed by its schema, and without edges it succeeds."""
    rng = random.Random(0)
    for tool in tools:
        jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
        state = starting_state([tool], rng)
        request = make_request(tool, state, rng, edge=False)
        jsonschema.validate(request.arguments, tool["inputSchema"])
        result = Simulator([tool], state, server, 0.0, rng).call(tool["name"], json.dumps(request.arguments))
        if tool["origin"] == "evolved":
            assert not result.startswith("error"), (tool["name"], result)
            edge = make_request(tool, state, rng, edge=True)
            result = Simulator([tool], state, server, 0.0, rng).call(tool["name"], json.dumps(edge.arguments))
            assert result.startswith("error: ") == (tool["semantics"]["verb"] != "list"), (tool["name"], result)


def test_the_catalogue_counts_and_declares_compactly() -> None:
    tools = catalogue.build(ToolsConfig(68, 0))
    figures = catalogue.summary(tools)
    assert figures["by_origin"] == {"real": len(real.REGISTERED), "evolved": 68} and figures["category_coverage"] == 1
    assert sum(figures["by_category"].values()) == figures["tools"] == len(tools)
    declared = catalogue.openai(tools[0])["function"]["parameters"]
    assert declared["properties"] == {"a": {"type": "integer"}, "b": {"type": "integer"}} and "title" not in json.dumps(declared)
