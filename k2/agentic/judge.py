"""The judge: a dialogue against its task's rubric, and only what passes is kept (report section 3.1.1).

The checks are programmatic: calls and state cannot be argued with. With an endpoint as language model, it judges as well what a
program cannot: whether the answers are clear and grounded in the tool results.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from k2.agentic.policy import unfinished
from k2.agentic.simulator import State, check
from k2.llm import ChatModel

Message = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str  # "" when passed; else the first check that failed
    detail: str = ""

    def record(self) -> dict[str, Any]:
        return {"passed": self.passed, "reason": self.reason, "detail": self.detail}


def judge(messages: list[Message], tools: list[dict[str, Any]], rubric: dict[str, Any], state: State) -> Verdict:
    """Check a finished dialogue. `tools` are the catalogue's, `state` is the simulator's at the end."""
    parts = by_user(messages)
    answers, pattern = rubric["success"]["answers"], rubric["pattern"]
    if len(parts) < len(pattern) or not parts[-1] or parts[-1][-1]["role"] != "assistant" or parts[-1][-1].get("tool_calls"):
        return Verdict(False, "unfinished", f"{len(parts)} of {len(pattern)} user messages, or no closing answer")
    known = {tool["name"]: tool for tool in tools}
    for number, (part, wanted, phrases) in enumerate(zip(parts, pattern, answers), 1):
        problem = calls_problem(part, wanted, known)
        if problem:
            return Verdict(False, problem[0], f"user message {number}: {problem[1]}")
        said = part[-1]["content"]
        for phrase in phrases:
            if not mentions(said, phrase):
                return Verdict(False, "wrong answer", f"user message {number}: the answer does not say {phrase!r}")
    if state != rubric["success"]["state"]:
        return Verdict(False, "wrong state", "the tools' state is not the expected one")
    return Verdict(True, "")


def by_user(messages: list[Message]) -> list[list[Message]]:
    """What follows each user message."""
    parts: list[list[Message]] = []
    for message in messages:
        if message["role"] == "user":
            parts.append([])
        elif parts:
            parts[-1].append(message)
    return parts


def calls_problem(part: list[Message], wanted: list[dict[str, Any]], tools: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with the calls after one user message: reason and detail. Calls that were busy must be made again, and
    succeed.
    """
    results = {message["tool_call_id"]: message["content"] for message in part if message["role"] == "tool"}
    left, again = list(wanted), []
    first = next((message for message in part if message.get("tool_calls")), None)
    for message in part:
        for call in message.get("tool_calls") or []:
            name = call["function"]["name"]
            arguments, problem = check(tools, name, call["function"]["arguments"])
            if arguments is None:
                return "invalid call", f"{name}: {problem}"
            made = {"name": name, "arguments": arguments}
            if made not in left:
                return ("unneeded call" if not wanted or made in wanted else "wrong call"), f"{name} {json.dumps(arguments)}"
            if unfinished(results.get(call["id"], "")):
                again.append(made)
            else:
                left.remove(made)
    if left:
        missing = left[0]["name"]
        return ("gave up" if left[0] in again else "missing call"), f"{missing} was not done"
    if len(wanted) > 1 and first is not None and len(first["tool_calls"]) < len(wanted):
        return "not parallel", f"{len(first['tool_calls'])} of {len(wanted)} calls together"
    return None


def mentions(text: str, phrase: str) -> bool:
    """Whether a text says a phrase, as words of its own."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


# -- the language model's part ----------------------------------------------------------------------------------------------------
INSTRUCTION = (
    "You judge an assistant that uses tools. Pass it only if every answer is clear and says nothing that the tool results and the "
    "user do not support. Reply with one word, PASS or FAIL, then a short reason."
)


def judge_by_model(dialogues: list[list[Message]], rubrics: list[dict[str, Any]], model: ChatModel) -> list[Verdict]:
    """A second opinion on dialogues that passed the program."""
    chats = []
    for messages, rubric in zip(dialogues, rubrics):
        shown = json.dumps({"rubric": rubric, "dialogue": messages}, ensure_ascii=False)
        chats.append([{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": shown}])
    verdicts = []
    for reply in model.generate(chats, max_new_tokens=64, temperature=0.0, top_p=1.0, seed=0):
        passed = reply.strip().upper().startswith("PASS")
        verdicts.append(Verdict(passed, "" if passed else "model's verdict", "" if passed else reply.strip()[:200]))
    return verdicts
