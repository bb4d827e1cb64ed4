"""Tool use in several turns against a store that really changes: ask, call, read the result, answer.

The user asks to add to a stock, to take from it or to count it; the quantities are known to the store alone, so the model must call
the declared tool with the right arguments and read its result. The verifier looks at the call, the store's state and the answer.

Reward of a request: 0.2 for a call that the declaration allows, 0.3 for the right call, 0.5 for the right answer after it with the
store in the right state. An episode's reward is the mean over its requests.
"""

import dataclasses
import json
import random
import re
from dataclasses import dataclass
from typing import Any

from k2.errors import ConfigError
from k2.gym.env import ATTEMPTS, Domain, Env, Message, Step, Task

ITEMS = ["cup", "hat", "pen", "bag", "key", "map", "box", "bed", "cap", "fan", "jar", "lamp", "book", "ring", "coin", "ball"]
OPERATIONS = ["add", "take", "count"]

CALL, RIGHT_CALL, RIGHT_ANSWER = 0.2, 0.3, 0.5


@dataclass(frozen=True)
class ToolUseSettings:
    """The knobs of params.yaml gym.domains.tool_use."""

    max_turns: int = 3  # assistant messages after which the episode ends; a request needs two
    items: int = 12  # names in the store, of 16
    max_quantity: int = 9  # of an item at first; also the most that is added
    operations: int = 1  # 1: add; 2: also take; 3: also count
    requests: int = 1  # that the user makes one after another

    def __post_init__(self) -> None:
        for name, most in (("max_turns", 100), ("items", len(ITEMS)), ("max_quantity", 10**6), ("operations", 3), ("requests", 20)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}: expected an integer from 1 to {most}, got {value!r}")
        if self.max_turns < 2 * self.requests:
            raise ValueError(f"max_turns: {self.max_turns} is too few; {self.requests} requests need {2 * self.requests}")


class ToolUseDomain(Domain):
    def __init__(self, name: str, held_out_seed: int, settings: dict[str, Any]) -> None:
        super().__init__(name, held_out_seed)
        known = [field.name for field in dataclasses.fields(ToolUseSettings)]
        for key in settings:
            if key not in known:
                raise ConfigError(f"params.yaml: gym.domains.{name}.{key}: unknown; known: {', '.join(known)}")
        try:
            self.settings = ToolUseSettings(**settings)
        except ValueError as error:
            raise ConfigError(f"params.yaml: gym.domains.{name}.{error}") from None

    def draw(self, seed: int, attempt: int) -> dict[str, Any]:
        rng, settings = random.Random(seed * ATTEMPTS + attempt), self.settings
        items = ITEMS[: settings.items]
        stock = {item: rng.randint(0, settings.max_quantity) for item in items}
        left, requests = dict(stock), []
        for _ in range(settings.requests):
            operation, item = rng.choice(OPERATIONS[: settings.operations]), rng.choice(items)
            if operation == "take" and left[item] == 0:
                operation = "count"
            most = left[item] if operation == "take" else settings.max_quantity
            number = 0 if operation == "count" else rng.randint(1, most)
            left[item] += {"count": 0, "add": number, "take": -number}[operation]
            requests.append({"operation": operation, "item": item, "number": number, "answer": left[item]})
        return {"prompt": "\n".join(map(ask, requests)), "stock": stock, "requests": requests}

    def env(self, task: Task) -> Env:
        return ToolUseEnv(self.settings, task)

    def solution(self, task: Task) -> list[Message]:
        env = self.env(task)
        for turn, request in enumerate(task["requests"]):
            function = {"name": request["operation"], "arguments": json.dumps(arguments(request))}
            call = {"id": f"functions.{function['name']}:{turn}", "type": "function", "function": function}
            env.step({"role": "assistant", "content": "", "tool_calls": [call]})
            env.step({"role": "assistant", "content": str(request["answer"])})
        return env.messages


class ToolUseEnv(Env):
    """The user's side, the store and the verifier of one dialogue."""

    def __init__(self, settings: ToolUseSettings, task: Task) -> None:
        self.stock, self.expected = dict(task["stock"]), dict(task["stock"])
        self.requests, self.at, self.turns_left = task["requests"], 0, settings.max_turns
        self.tools = declare(settings)
        self.messages = [{"role": "user", "content": ask(self.requests[0])}]
        self._begin()

    def _begin(self) -> None:
        request = self.requests[self.at]
        self.expected[request["item"]] = request["answer"]  # the store after this request
        self.called = self.called_right = False

    def react(self, message: Message) -> Step:
        self.turns_left -= 1
        calls = message.get("tool_calls") or []
        if calls:
            observations, reward = [], 0.0
            for call in calls:
                content, gained = self._execute(call)
                observations.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": content})
                reward += gained
            return Step(observations, reward / len(self.requests), done=self.turns_left <= 0)
        right = str(message.get("content") or "").strip() == str(self.requests[self.at]["answer"])
        reward = RIGHT_ANSWER if right and self.called_right and self.stock == self.expected else 0.0
        self.at += 1
        if self.at == len(self.requests) or self.turns_left <= 0:
            return Step([], reward / len(self.requests), done=True)
        self._begin()
        return Step([{"role": "user", "content": ask(self.requests[self.at])}], reward / len(self.requests), done=False)

    def _execute(self, call: dict[str, Any]) -> tuple[str, float]:
        """Run one call on the store: its result, or an error that the model reads, and the reward gained."""
        name, given, error = parse_call(call, self.tools or [])
        if error:
            return error, 0.0
        reward = 0.0 if self.called else CALL
        self.called = True
        request = self.requests[self.at]
        if not self.called_right and name == request["operation"] and given == arguments(request):
            self.called_right = True
            reward += RIGHT_CALL
        item = given["item"]
        if item not in self.stock:
            return f"error: no item {item}", reward
        number = given.get("number", 0)
        if not 0 <= number <= 10**9:
            return "error: number out of range", reward
        if name == "take" and number > self.stock[item]:
            return f"error: only {self.stock[item]} {item}", reward
        self.stock[item] += {"count": 0, "add": number, "take": -number}[name]
        return str(self.stock[item]), reward


# -- wording ----------------------------------------------------------------------------------------------------------------------
def ask(request: dict[str, Any]) -> str:
    """The user's words: one wording a request, so that the split by prompt holds out the request itself."""
    if request["operation"] == "count":
        return f"Count {request['item']}"
    return f"{request['operation'].capitalize()} {request['number']} {request['item']}"


def arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the right call."""
    return {"item": request["item"]} | ({} if request["operation"] == "count" else {"number": request["number"]})


def declare(settings: ToolUseSettings) -> list[dict[str, Any]]:
    """OpenAI specifications of the tools that the domain's operations need. Terse: they are in every prompt."""
    tools = []
    for operation in OPERATIONS[: settings.operations]:
        properties: dict[str, Any] = {"item": {"type": "string"}}
        if operation != "count":
            properties["number"] = {"type": "integer"}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        tools.append({"type": "function", "function": {"name": operation, "parameters": parameters}})
    return tools


def parse_call(call: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, dict[str, Any], str]:
    """Name and arguments of an OpenAI tool call, and why it is refused ("" when the declaration allows it).

    Arguments are checked against the declared JSON schema. Nothing that a model writes raises.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    function = call.get("function") or {}
    name = str(function.get("name", ""))
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if name not in schemas:
        return name, {}, f"error: no tool {re.sub(r'[^A-Za-z0-9_.-]', '', name)[:32]}"
    try:
        given = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError, RecursionError):
        return name, {}, "error: arguments are not JSON"
    problem = best_match(Draft202012Validator(schemas[name]).iter_errors(given))
    if problem is not None:
        return name, {}, f"error: {problem.message[:80]}"
    if not isinstance(given, dict):
        return name, {}, "error: arguments are not an object"
    return name, given, ""
