"""The assistant that solves tasks: a programmatic expert, with deliberate mistakes in a share of the dialogues for the judge to
find.

The expert knows what the user means (the task's calls); results it learns from the tools alone.
"""

import json
import random
from typing import Any

from k2.agentic.simulator import BUSY, PARTIAL
from k2.agentic.tasks import Task, Turn, key_phrase

Message = dict[str, Any]
Results = list[tuple[dict[str, Any], str]]  # calls of the turn so far, with their results

MISTAKES = ("wrong_argument", "wrong_tool", "no_call", "misread", "gives_up", "extra_call", "guesses")


class Expert:
    """Acts turn by turn in one dialogue. `mistake` (of MISTAKES) is made once, in the first turn that allows it."""

    def __init__(self, task: Task, mistake: str | None, rng: random.Random) -> None:
        self.tools = {tool["name"]: tool for tool in task.tools}
        self.mistake, self.rng = mistake, rng
        self.counter = 0  # of calls in the dialogue, for their ids
        self.made = False  # the mistake

    def act(self, turn: Turn, results: Results) -> Message:
        """The next assistant message: calls, or the turn's closing answer."""
        pending = self._pending(turn, results)
        if not turn.calls:
            return self._answer_without_tools(turn, results)
        if pending and self._now("no_call"):
            return {"role": "assistant", "content": "Done."}
        if pending and results and self._now("gives_up"):
            return {"role": "assistant", "content": self._answer(results)}
        if pending:
            return self._call(self._spoil(pending))
        if self._now("extra_call"):
            return self._call([results[-1][0]])
        return {"role": "assistant", "content": self._answer(results)}

    def _pending(self, turn: Turn, results: Results) -> list[dict[str, Any]]:
        """Calls of the turn not yet answered by more than "busy" or a part. A call spoiled on purpose counts as made."""
        done = [call for call, result in results if not unfinished(result)]
        if self.made and self.mistake in ("wrong_argument", "wrong_tool") and len(done) >= len(turn.calls):
            return []
        waiting = []
        for call in turn.calls:
            if call in done:
                done.remove(call)
            else:
                waiting.append(call)
        return waiting

    def _spoil(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same calls, one of them wrong if that is the mistake to make."""
        if self.mistake == "wrong_tool" and self._now("wrong_tool"):
            return [{**calls[0], "name": calls[0]["name"] + "_all"}, *calls[1:]]
        if calls[0]["arguments"] and self._now("wrong_argument"):
            name = self.rng.choice(sorted(calls[0]["arguments"]))
            value = calls[0]["arguments"][name]
            wrong = value + self.rng.choice([1, 2, 3]) if isinstance(value, int) else value + "s"
            return [{**calls[0], "arguments": {**calls[0]["arguments"], name: wrong}}, *calls[1:]]
        return calls

    def _call(self, calls: list[dict[str, Any]]) -> Message:
        tool_calls = []
        for call in calls:
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            tool_calls.append({"id": f"functions.{call['name']}:{self.counter}", "type": "function", "function": function})
            self.counter += 1
        return {"role": "assistant", "content": "", "tool_calls": tool_calls}

    def _answer(self, results: Results) -> str:
        """What the results say, each call's last one in the order of the calls."""
        last: dict[str, tuple[dict[str, Any], str]] = {}
        for call, result in results:
            last[json.dumps(call)] = (call, result)
        sentences = [sentence(self.tools.get(call["name"]), call, result) for call, result in last.values()]
        text = " ".join(sentences)
        if not self._now("misread"):
            return text
        wrong = "".join(str((int(c) + 1) % 10) if c.isdecimal() else c for c in text)
        return wrong if wrong != text else "It is unknown."

    def _answer_without_tools(self, turn: Turn, results: Results) -> Message:
        """The reply; the mistake here is to guess, with a call that nobody asked for in full."""
        if not results and self.tools and self._now("guesses"):
            tool = self.rng.choice(sorted(self.tools))
            properties = self.tools[tool]["inputSchema"]["properties"]
            guess = {name: 1 if kind.get("type") == "integer" else "A1" for name, kind in properties.items()}
            return self._call([{"name": tool, "arguments": guess}])
        return {"role": "assistant", "content": turn.reply}

    def _now(self, mistake: str) -> bool:
        """Whether to make this mistake now; it is made once."""
        if self.made or self.mistake != mistake:
            return False
        self.made = True
        return True


def unfinished(result: str) -> bool:
    """Whether a call that returned this is worth making again."""
    return result == BUSY or result.startswith(PARTIAL)


def sentence(tool: dict[str, Any] | None, call: dict[str, Any], result: str) -> str:
    """The answer about one call, in few words."""
    if tool is None or result.startswith(("error: ", PARTIAL)):
        return f"Sorry, {result.removeprefix('error: ')}."
    phrase = key_phrase(tool, call["arguments"], result)
    return f"{phrase}." if phrase == "Done" else f"It is {phrase}."
