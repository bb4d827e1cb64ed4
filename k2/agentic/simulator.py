"""The tool simulator: executes evolved tools on a state that it keeps, real tools on their server, with failures at a given rate.

Outcomes of a call (report section 3.1.1: success, partial failure, edge cases):

    success   the result as text
    edge      "error: ..." that lies in the request itself (no such lamp, a level above 9, division by zero): calling again is
    no help busy      "error: busy", nothing was done: call again partial   "partial: ...", done in part (some of the fields):
    call again
"""

import functools
import json
import random
from typing import Any, Protocol

from k2.agentic.evolve import Tool

State = dict[str, dict[str, dict[str, Any]]]  # entity: name: field: value
BUSY, PARTIAL = "error: busy", "partial: "


class RealCalls(Protocol):
    """What the simulator needs of the running server (k2.agentic.real.RealTools)."""

    def call(self, name: str, arguments: dict[str, Any]) -> str: ...
    def reset(self) -> None: ...


class Simulator:
    """One dialogue's world. Evolved state starts from `state` (copied), the real server's is reset."""

    def __init__(self, tools: list[Tool], state: State, real: RealCalls, failure_rate: float, rng: random.Random) -> None:
        self.tools = {tool["name"]: tool for tool in tools}
        self.state: State = json.loads(json.dumps(state))
        self.real, self.failure_rate, self.rng = real, failure_rate, rng
        if any(tool["origin"] == "real" for tool in tools):
            real.reset()

    def call(self, name: str, arguments: str) -> str:
        """The text that a call returns. What it cannot accept is an "error: ..." text too, never an exception."""
        given, problem = check(self.tools, name, arguments)
        if given is None:
            return problem
        tool = self.tools[name]
        fails = self.rng.random() < self.failure_rate
        if fails and not (tool["origin"] == "evolved" and len(tool["semantics"]["uses"]) > 1 and self.rng.random() < 0.5):
            return BUSY
        if tool["origin"] == "real":
            return self.real.call(name, given)
        return execute(tool["semantics"], given, self.state, partly=fails)


def check(tools: dict[str, Tool], name: str, arguments: str) -> tuple[dict[str, Any] | None, str]:
    """The arguments as an object, or None and why the declared schema does not allow the call."""
    if name not in tools:
        return None, "error: no such tool"
    try:
        given = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return None, "error: arguments are not JSON"
    if not isinstance(given, dict):
        return None, "error: arguments are not an object"
    schema = tools[name]["inputSchema"]
    unknown = [key for key in given if key not in schema["properties"]]
    if unknown:
        return None, f"error: unknown {unknown[0]}"
    problem = next(iter(_validator(json.dumps(schema)).iter_errors(given)), None)
    return (None, f"error: {problem.message[:80]}") if problem else (given, "")


@functools.cache
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema))


def execute(semantics: dict[str, Any], given: dict[str, Any], state: State, partly: bool = False) -> str:
    """Apply a verb to the state and return the result's text. `partly`: of several fields only the first is written."""
    entity, verb, uses = semantics["entity"], semantics["verb"], semantics["uses"]
    shown = entity.replace("_", " ")
    entries = state.setdefault(entity, {})
    if verb == "list":
        return ", ".join(sorted(entries)) or "none"
    name = given[semantics["key"]]
    entry = entries.get(name)
    if verb == "create":
        if entry is not None and all(field in entry for field in uses):
            return f"error: {shown} {name} exists"
    elif entry is None:
        return f"error: no {shown} {name}"
    if verb == "delete":
        del entries[name]
        return "ok"
    if verb == "read":
        assert entry is not None
        return ", ".join(str(entry.get(field, "not set")) for field in uses)
    if verb == "toggle":
        assert entry is not None
        choices = semantics["fields"][uses[0]]["enum"]
        entry[uses[0]] = choices[1] if entry.get(uses[0]) == choices[0] else choices[0]
        return entry[uses[0]]
    for field in uses:
        problem = out_of_range(field, given[field], semantics["fields"][field])
        if problem:
            return problem
    written = uses[:1] if partly else uses
    entries.setdefault(name, {}).update({field: given[field] for field in written})
    return f"{PARTIAL}{uses[-1]} not set" if partly else "ok"


def out_of_range(field: str, value: Any, kind: dict[str, Any]) -> str:
    """The error of a value that its field cannot hold, "" if it can."""
    if "enum" in kind:
        return "" if value in kind["enum"] else f"error: no {field} {value}"
    if value > kind["maximum"]:
        return f"error: {field} above {kind['maximum']}"
    return f"error: {field} below {kind['minimum']}" if value < kind["minimum"] else ""
