"""Agents, users and tasks with rubrics (report section 3.1.1).

An agent is a system prompt and one to three tools of one application; a user is a persona with a style of speech; a task is
what the user wants, from simple to complex, with an explicit rubric: the state and answers that count as success, the tool-use
pattern that is expected, the checkpoints on the way. The rubric comes from a run of the tools without failures, not from any
policy.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from k2.agentic.catalogue import openai
from k2.agentic.simulator import RealCalls, Simulator, State

Tool = dict[str, Any]

# a persona's style: how it puts a request, {ask} or {Ask} with a capital; how it greets and thanks
PERSONAS = {
    "plain": ("{Ask}.", "Hello.", "Thanks."),
    "polite": ("Please {ask}.", "Good day.", "Thank you."),
    "curious": ("Can you {ask}?", "Hi, are you there?", "Great, thanks."),
    "terse": ("{ask}", "hi", "ok"),
    "chatty": ("Hi! I want to {ask}.", "Hi there!", "Wow, thanks!"),
    "busy": ("{Ask}, quick.", "Hey.", "Fine."),
}
PROMPTS = ["You run {application}.", "You help with {application}.", "Tools for {application}."]

# complexity: its share of the tasks
LEVELS = {"simple": 0.35, "parallel": 0.15, "chain": 0.2, "clarify": 0.12, "no_tool": 0.08, "out_of_scope": 0.1}
DECLARED_CHARACTERS = 480  # of an agent's tool declarations, about 190 tokens: they stand in every dialogue
EDGE_RATE = 0.12  # of requests that ask for what is not there, or for too much
GREETING, WELCOME, NO_TOOL = "Hello! How can I help?", "You are welcome.", "Sorry, I have no tool for that."


@dataclass
class Turn:
    """One message of the user, and what the rubric expects after it."""

    user: str
    calls: list[dict[str, Any]] = field(default_factory=list)  # {"name", "arguments"}; several: together in one message
    answer: list[str] = field(default_factory=list)  # what the closing answer must say
    reply: str = ""  # the whole answer where no tool is called


@dataclass
class Task:
    level: str
    persona: str
    system: str
    tools: list[Tool]
    state: State  # at the beginning
    turns: list[Turn]
    final_state: State = field(default_factory=dict)

    def rubric(self) -> dict[str, Any]:
        """The explicit rubric as it is stored: success criteria, expected pattern, checkpoints."""
        checkpoints = []
        for i, turn in enumerate(self.turns):
            if turn.calls:
                names = " and ".join(call["name"] for call in turn.calls)
                checkpoints.append(f"after user message {i + 1}: {names} called{' in one message' if len(turn.calls) > 1 else ''}")
            else:
                checkpoints.append(f"after user message {i + 1}: no call")
        return {
            "level": self.level,
            "persona": self.persona,
            "success": {"state": self.final_state, "answers": [turn.answer for turn in self.turns]},
            "pattern": [turn.calls for turn in self.turns],
            "checkpoints": checkpoints,
        }


@dataclass
class Request:
    """One wish of the user: a call, and its words."""

    tool: Tool
    arguments: dict[str, Any]
    words: str

    @property
    def call(self) -> dict[str, Any]:
        return {"name": self.tool["name"], "arguments": self.arguments}


class TaskMaker:
    """Draws tasks over a catalogue of tools."""

    def __init__(self, tools: Iterable[Tool], real: RealCalls) -> None:
        self.real = real
        self.agents: dict[tuple[str, str, str], list[Tool]] = {}  # the tools that may stand in one agent
        for tool in tools:
            owner = tool["semantics"].get("entity", "")
            self.agents.setdefault((tool["origin"], tool["application"], owner), []).append(tool)

    def draw(self, rng: random.Random, level: str | None = None) -> Task:
        """A task and its rubric."""
        level = level or rng.choices(list(LEVELS), list(LEVELS.values()))[0]
        agent = rng.choice(sorted(self.agents))
        if level == "clarify":
            able = [key for key in sorted(self.agents) if any(omissible(tool) for tool in self.agents[key])]
            level, agent = (level, rng.choice(able)) if able else ("simple", agent)
        tools = self._toolset(rng, agent, level)
        state = starting_state(tools, rng)
        persona = rng.choice(list(PERSONAS))
        system = rng.choice(PROMPTS).format(application=agent[1])
        task = Task(level, persona, system, tools, state, [])
        world = Simulator(tools, state, self.real, 0.0, rng)
        task.turns = self._turns(rng, task, agent, world)
        task.final_state = world.state
        return task

    def _toolset(self, rng: random.Random, agent: tuple[str, str, str], level: str) -> list[Tool]:
        """One to three tools of the agent's pool, as many as the declaration's budget allows."""
        pool = rng.sample(self.agents[agent], len(self.agents[agent]))
        if level == "clarify":
            pool.sort(key=lambda tool: not omissible(tool))  # one that can be asked for by halves comes first
        chosen, room = [], DECLARED_CHARACTERS
        for tool in pool[: rng.choice([1, 2, 3])]:
            room -= len(json.dumps(openai(tool), separators=(",", ":")))
            if chosen and room < 0:
                break
            chosen.append(tool)
        return rng.sample(chosen, len(chosen))

    def _turns(self, rng: random.Random, task: Task, agent: tuple[str, str, str], world: Simulator) -> list[Turn]:
        style, hello, thanks = PERSONAS[task.persona]

        def draw() -> Request:
            return make_request(rng.choice(task.tools), world.state, rng)

        if task.level == "no_tool":
            return [Turn(hello, answer=["help"], reply=GREETING)]
        if task.level == "out_of_scope":
            others = [key for key in sorted(self.agents) if key[1] != agent[1]]
            stranger = make_request(rng.choice(self.agents[rng.choice(others)]), {}, rng) if others else None
            words = stranger.words if stranger else "paint the wall"
            return [Turn(say(style, words), answer=["no tool"], reply=NO_TOOL)]
        if task.level == "clarify":
            tool = rng.choice([tool for tool in task.tools if omissible(tool)])
            request = make_request(tool, world.state, rng, edge=False)
            missing = tool["semantics"]["uses"][0]
            short = say(style, request.words.partition(f" {JOIN[tool['semantics']['verb']]} ")[0])
            return [
                Turn(short, answer=[missing], reply=f"What {missing}?"),
                expected(str(request.arguments[missing]), [request], world),
            ]
        if task.level == "parallel":
            first = draw()
            second = next((r for r in (make_request(first.tool, world.state, rng) for _ in range(8)) if r.call != first.call), None)
            if second and not conflict(first, second):
                return [expected(say(style, f"{first.words} and {second.words}"), [first, second], world)]
            return [expected(say(style, first.words), [first], world)]
        turns = []
        for _ in range(2 if task.level == "chain" else 1):
            request = draw()
            turns.append(expected(say(style, request.words), [request], world))
        if task.level == "simple" and rng.random() < 0.15:
            turns.append(Turn(thanks, answer=["welcome"], reply=WELCOME))
        return turns


def expected(user: str, requests: list[Request], world: Simulator) -> Turn:
    """The turn of these requests with the answers that a run without failures gives; the world goes on."""
    answers = [key_phrase(request.tool, request.arguments, run(request, world)) for request in requests]
    return Turn(user, [request.call for request in requests], answers)


def run(request: Request, world: Simulator) -> str:
    return world.call(request.tool["name"], json.dumps(request.arguments))


def conflict(first: Request, second: Request) -> bool:
    """Whether two calls write the same entry, so that they must not go side by side."""
    semantics = first.tool["semantics"]
    key = semantics.get("key") or next(iter(semantics.get("values", {})), "")
    writes = semantics.get("verb") not in (None, "read", "list") or first.tool["name"].startswith(("put_", "drop_"))
    return writes and first.arguments.get(key) == second.arguments.get(key)


# -- words ------------------------------------------------------------------------------------------------------------------------
JOIN = {"update": "to", "create": "with"}  # what leads to the value in a request


def say(style: str, ask: str) -> str:
    return style.format(ask=ask, Ask=ask[0].upper() + ask[1:])


def omissible(tool: Tool) -> bool:
    """Whether a request for the tool can leave its one value out."""
    semantics = tool["semantics"]
    return semantics.get("verb") in JOIN and len(semantics["uses"]) == 1


def make_request(tool: Tool, state: State, rng: random.Random, edge: bool | None = None) -> Request:
    """A wish that the tool can fulfil; with `edge` (None: now and then) one that it must refuse."""
    semantics = tool["semantics"]
    if tool["origin"] == "real":
        arguments = {name: rng.choice(values) for name, values in semantics["values"].items()}
        return Request(tool, arguments, semantics["ask"].format(**arguments))
    verb, uses, entries = semantics["verb"], semantics["uses"], state.get(semantics["entity"], {})
    shown = semantics["entity"].replace("_", " ")
    if verb == "list":
        return Request(tool, {}, f"list every {shown}")
    edge = rng.random() < EDGE_RATE if edge is None else edge
    there, absent = sorted(entries), [name for name in semantics["keys"] if name not in entries]
    bounded = verb in JOIN and any("maximum" in semantics["fields"][used] for used in uses)
    too_much = edge and bounded and rng.random() < 0.5  # the edge lies in a value, not in the name
    wanted, other = (absent, there) if (verb == "create") != (edge and not too_much) else (there, absent)
    name = rng.choice(wanted or other)
    arguments = {semantics["key"]: name}
    if verb in JOIN:
        for used in uses:
            kind = semantics["fields"][used]
            arguments[used] = kind["maximum"] + rng.randint(1, 9) if too_much and "maximum" in kind else value_of(kind, rng)
    values = " and ".join(f"{used} {arguments[used]}" for used in uses if used in arguments)
    if verb == "update" and len(uses) == 1:
        return Request(tool, arguments, f"set {uses[0]} of {shown} {name} to {arguments[uses[0]]}")
    words = {
        "create": f"add {shown} {name}" + (f" with {values}" if uses else ""),
        "read": f"get {' and '.join(uses)} of {shown} {name}",
        "update": f"set {shown} {name} to {values}",
        "delete": f"remove {shown} {name}",
        "toggle": f"flip {' '.join(uses)} of {shown} {name}",
    }[verb]
    return Request(tool, arguments, words)


def key_phrase(tool: Tool, arguments: dict[str, Any], result: str) -> str:
    """What an answer about this call has to say: the value, the reason of a refusal, or that it is done."""
    if result.startswith("error: "):
        return result.removeprefix("error: ")
    verb = tool["semantics"].get("verb")
    if verb in ("create", "update", "delete") or (verb is None and result == "ok"):
        return "Done"
    return result


def starting_state(tools: list[Tool], rng: random.Random) -> State:
    """Half of the entity's names, with values."""
    state: State = {}
    for tool in tools:
        semantics = tool["semantics"]
        if tool["origin"] == "evolved" and semantics["entity"] not in state:
            names = sorted(rng.sample(semantics["keys"], len(semantics["keys"]) // 2))
            state[semantics["entity"]] = {
                name: {f: value_of(kind, rng) for f, kind in semantics["fields"].items()} for name in names
            }
    return state


def value_of(kind: dict[str, Any], rng: random.Random) -> Any:
    return rng.choice(kind["enum"]) if "enum" in kind else rng.randint(kind["minimum"], kind["maximum"])
