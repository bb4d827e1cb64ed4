"""Multi-turn tool-use dialogues by simulation and rejection sampling (report section 3.1.1)."""

import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from k2.agentic import catalogue, judge, real
from k2.agentic.policy import MISTAKES, Expert
from k2.agentic.simulator import Simulator
from k2.agentic.tasks import Task, TaskMaker
from k2.config import TrajectoriesConfig
from k2.errors import K2Error
from k2.llm import ChatModel
from k2.progress import track

MISTAKE_SHARE = 0.15  # of dialogues in which the policy errs on purpose
HELD_OUT_TOOLS, HELD_OUT_TASKS = 0.05, 0.05  # shares of agents' applications and of tasks kept from training
Record = dict[str, Any]


@dataclass
class Trajectories:
    train: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)  # with `held_out`: "tool" or "task"
    rejected: list[Record] = field(default_factory=list)  # with `verdict`
    duplicates: int = 0


def synthesise(tools: list[dict[str, Any]], config: TrajectoriesConfig, model: ChatModel | None = None) -> Trajectories:
    """Simulate `dialogues` dialogues, judge them, part them. `model` judges as well, if there is one."""
    if not tools:
        raise K2Error("data/tools/tools.json: no tools; raise tools.evolved_tools and run `dvc repro tools`")
    out, seen = Trajectories(), set()
    passed: list[Record] = []
    with real.serve() as server:
        maker = TaskMaker(tools, server)
        for number in track(range(config.dialogues), "trajectories", unit="dialogue"):
            rng = random.Random(f"trajectory {config.seed} {number}")
            task = maker.draw(rng)
            mistake = rng.choice(MISTAKES) if rng.random() < MISTAKE_SHARE else None
            simulator = Simulator(task.tools, task.state, server, config.failure_rate, rng)
            messages = converse(task, Expert(task, mistake, rng), simulator, config.max_turns)
            verdict = judge.judge(messages, task.tools, task.rubric(), simulator.state)
            record = record_of(task, messages)
            key = json.dumps([record["messages"], record["tools"]])
            if key in seen:
                out.duplicates += 1
            elif verdict.passed:
                passed.append(record)
            else:
                out.rejected.append({**record, "verdict": verdict.record()})
            seen.add(key)
    if model is not None:
        passed = second_opinion(passed, model, out)
    held_out = held_out_applications(tools, config.seed)
    for record in passed:
        split = "tool" if record["application"] in held_out else "task" if is_held_out(record) else ""
        (out.validation if split else out.train).append({**record, "held_out": split} if split else record)
    if not out.train:
        raise K2Error(
            "params.yaml: trajectories.dialogues: no dialogue is left for training; ask for more, or for a lower failure_rate"
        )
    return out


def converse(task: Task, policy: Expert, simulator: Simulator, max_turns: int) -> list[dict[str, Any]]:
    """Play user, policy and tools against each other; ends after `max_turns` assistant messages at the latest."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": task.system}]
    left = max_turns
    for turn in task.turns:
        messages.append({"role": "user", "content": turn.user})
        results = []
        while left > 0:
            left -= 1
            message = policy.act(turn, results)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                function = call["function"]
                result = simulator.call(function["name"], function["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                results.append(({"name": function["name"], "arguments": json.loads(function["arguments"])}, result))
        if left <= 0:
            break
    return messages


def record_of(task: Task, messages: list[dict[str, Any]]) -> Record:
    application = task.tools[0]["application"]
    return {
        "messages": messages,
        "tools": [catalogue.openai(tool) for tool in task.tools],
        "domain": task.tools[0]["category"],
        "application": application,
        "rubric": task.rubric(),
    }


def second_opinion(passed: list[Record], model: ChatModel, out: Trajectories) -> list[Record]:
    """Those that the language model passes too; the others go to the rejected."""
    verdicts = judge.judge_by_model([record["messages"] for record in passed], [record["rubric"] for record in passed], model)
    out.rejected += [{**record, "verdict": v.record()} for record, v in zip(passed, verdicts) if not v.passed]
    return [record for record, v in zip(passed, verdicts) if v.passed]


def held_out_applications(tools: list[dict[str, Any]], seed: int) -> set[str]:
    """Applications whose tools training never sees; none if there are fewer than five."""
    names = sorted({tool["application"] for tool in tools})
    count = max(1, round(len(names) * HELD_OUT_TOOLS)) if len(names) >= 5 else 0
    return set(random.Random(f"held out {seed}").sample(names, count))


def is_held_out(record: Record) -> bool:
    """Whether a task is kept from training: by the hash of its tools and the user's words, so that the same task never is in
    both.
    """
    words = [message["content"] for message in record["messages"] if message["role"] == "user"]
    digest = hashlib.sha256(json.dumps([record["tools"], words]).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_TASKS * 2**32


def summary(data: Trajectories) -> dict[str, Any]:
    """Counts, the judge's reasons, and the shape of the dialogues that passed."""
    kept = data.train + data.validation
    calls = [sum(len(m.get("tool_calls") or []) for m in record["messages"]) for record in kept]
    turns = [sum(m["role"] == "assistant" for m in record["messages"]) for record in kept]
    parallel = [any(len(m.get("tool_calls") or []) > 1 for m in record["messages"]) for record in kept]
    count = max(1, len(kept))
    return {
        "kept": len(kept),
        "train": len(data.train),
        "validation": len(data.validation),
        "rejected": len(data.rejected),
        "duplicates": data.duplicates,
        "pass_rate": round(len(kept) / max(1, len(kept) + len(data.rejected)), 4),
        "rejected_by_reason": dict(sorted(Counter(r["verdict"]["reason"] for r in data.rejected).items())),
        "kept_by_level": dict(sorted(Counter(r["rubric"]["level"] for r in kept).items())),
        "mean_turns": round(sum(turns) / count, 3),
        "calls_per_dialogue": round(sum(calls) / count, 3),
        "no_call_share": round(sum(not c for c in calls) / count, 4),
        "parallel_share": round(sum(parallel) / count, 4),
        "tools_used": len({c["function"]["name"] for r in kept for m in r["messages"] for c in m.get("tool_calls") or []}),
    }
