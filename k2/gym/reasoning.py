"""Any dataset of reasoning-gym as a single-turn domain: its questions, its verifier.

The dataset makes the entry and its own `score_answer` is the verifier, so partial credit is whatever that gives (chain_sum: the
share of the answer that is the right number; spell_backward: the share of letters in place). Seven datasets have a shorter wording
than the library's, for small models: letters stand apart, since a BPE token would hide them, and the answer needs no list syntax.
The entry's answer stays.

An answer is the assistant's content, or what follows its last "Answer:".
"""

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k2.errors import ConfigError
from k2.gym.env import ATTEMPTS, Domain, Env, Message, Step, Task

Entry = dict[str, Any]  # reasoning-gym's: "question", "answer", "metadata"


@dataclass(frozen=True)
class Wording:
    """How a dataset's entry is asked, solved and read back."""

    question: Callable[[Entry], str] = lambda entry: entry["question"].strip()
    solution: Callable[[Entry], str] = lambda entry: entry["answer"]
    read: Callable[[str, Entry], str] = lambda answer, entry: answer  # in the form that the dataset scores, "" if it has none


# -- the short wordings -----------------------------------------------------------------------------------------------------------
def _sum_steps(entry: Entry) -> str:
    """Two terms: the answer. More: running totals from left to right, then the answer."""
    terms = entry["metadata"]["expression"].split()
    total, steps = int(terms[0]), []
    for operator, term in zip(terms[1::2], terms[2::2]):
        result = total + int(term) if operator == "+" else total - int(term)
        steps.append(f"{total} {operator} {term} = {result}")
        total = result
    return entry["answer"] if len(steps) < 2 else f"{'; '.join(steps)} Answer: {entry['answer']}"


def _numbers(values: list[str]) -> str:
    return " ".join(f"{float(value):g}" for value in values)


def _read_numbers(answer: str, entry: Entry) -> str:
    """A JSON list for number_sorting's scorer, which lets errors up to 1 pass: other numbers than the question's are refused."""
    try:
        given = sorted(float(word) for word in answer.split())
    except ValueError:
        return ""
    if given != sorted(float(value) for value in entry["metadata"]["original_numbers"]):
        return ""
    return json.dumps(answer.split())


def _as_in(entry: Entry, word: str) -> str:
    """A number as the question's list spells it ("-0" and "7.0" for 0 and 7), for scorers that compare text."""
    spelled = {_numbers([text]): text for text in entry["metadata"]["original_numbers"]}
    return spelled.get(word, word)


WORDINGS: dict[str, Wording] = {
    "chain_sum": Wording(
        question=lambda entry: f"{entry['metadata']['expression']} = ?",
        solution=_sum_steps,
        read=lambda answer, entry: answer if re.fullmatch(r"-?\d+", answer) else "",
    ),
    "gcd": Wording(
        question=lambda entry: f"GCD: {' '.join(map(str, entry['metadata']['numbers']))}",
        read=lambda answer, entry: answer if answer.isdecimal() else "",
    ),
    "number_filtering": Wording(
        question=lambda e: (
            f"{e['metadata']['operation'].replace('_', ' ').capitalize()} than {_numbers([e['metadata']['filter_value']])}: "
            f"{_numbers(e['metadata']['original_numbers'])}"
        ),
        solution=lambda entry: _numbers(entry["metadata"]["result"]) or "none",
        read=lambda answer, entry: "[]" if answer == "none" else str([_as_in(entry, word) for word in answer.split()]),
    ),
    "letter_counting": Wording(
        question=lambda e: f"Count {e['metadata']['target_letter']} in: {' '.join('_'.join(e['metadata']['span']).lower())}",
        read=lambda answer, entry: answer if answer.isdecimal() else "",
    ),
    "number_sorting": Wording(
        question=lambda e: f"Sort {e['metadata']['direction']}: {_numbers(e['metadata']['original_numbers'])}",
        solution=lambda entry: _numbers(entry["metadata"]["sorted_numbers"]),
        read=_read_numbers,
    ),
    "spiral_matrix": Wording(
        question=lambda e: f"Spiral: {' / '.join(' '.join(map(str, row)) for row in e['metadata']['matrix'])}",
        read=lambda answer, entry: answer if re.fullmatch(r"\d( \d)*", answer) else "",
    ),
    "spell_backward": Wording(
        question=lambda entry: f"Reverse: {' '.join(entry['metadata']['word'].lower())}",
        solution=lambda entry: " ".join(entry["answer"].lower()),
        read=lambda answer, entry: answer.replace(" ", "") if re.fullmatch(r"\S( \S)*", answer) else "",
    ),
}


# -- domain -----------------------------------------------------------------------------------------------------------------------
class ReasoningDomain(Domain):
    """Settings: `dataset`, a name in reasoning-gym, and that dataset's own arguments, which are the knobs of difficulty."""

    def __init__(self, name: str, held_out_seed: int, settings: dict[str, Any]) -> None:
        super().__init__(name, held_out_seed)
        arguments = dict(settings)
        dataset = str(arguments.pop("dataset"))
        self.dataset = open_dataset(dataset, arguments, f"gym.domains.{name}")
        self.wording = WORDINGS.get(dataset, Wording())

    def draw(self, seed: int, attempt: int) -> dict[str, Any]:
        try:
            entry = self.dataset[seed * ATTEMPTS + attempt]
        except IndexError:
            raise ConfigError(
                f"params.yaml: gym.domains.{self.name}.dataset: has a fixed list of tasks, not drawn by seed; take another"
            ) from None
        entry = json.loads(json.dumps(entry, default=str))  # a few datasets put their own types into the metadata
        return {"prompt": self.wording.question(entry), "entry": entry}

    def env(self, task: Task) -> Env:
        return ReasoningEnv(self, task)

    def solution(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": self.wording.solution(task["entry"])}]

    def score(self, content: str, entry: Entry) -> float:
        """Reward of an assistant's content, in [0, 1]."""
        answer = self.wording.read(content.rpartition("Answer:")[2].strip(), entry)
        if not answer:
            return 0.0
        try:
            reward = float(self.dataset.score_answer(answer, entry))
        except Exception:  # the scorers parse what the model wrote, each in its own way; what they cannot read is wrong
            return 0.0
        return min(max(reward, 0.0), 1.0)


class ReasoningEnv(Env):
    """One question, one answer."""

    def __init__(self, domain: ReasoningDomain, task: Task) -> None:
        self.domain, self.entry = domain, task["entry"]
        self.messages = [{"role": "user", "content": task["prompt"]}]

    def react(self, message: Message) -> Step:
        if message.get("tool_calls"):  # none was declared
            return Step(reward=0.0, done=True)
        return Step(reward=self.domain.score(str(message.get("content") or ""), self.entry), done=True)


def open_dataset(dataset: str, arguments: dict[str, Any], key: str) -> Any:
    """A reasoning-gym dataset by name. ConfigError names the key of params.yaml at fault."""
    from reasoning_gym import create_dataset  # 0.7 s: it registers all of its datasets
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        close = difflib.get_close_matches(dataset, DATASETS, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "see the gallery of reasoning-gym"
        raise ConfigError(f"params.yaml: {key}.dataset: reasoning-gym has no `{dataset}`; {hint}")
    known = [name for name in DATASETS[dataset][1].__dataclass_fields__ if name not in ("seed", "size")]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"params.yaml: {key}.{name}: `{dataset}` has no such argument; it has {', '.join(known)}")
    try:
        return create_dataset(dataset, seed=0, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"params.yaml: {key}: `{dataset}` refuses these arguments: {' '.join(str(error).split())}") from None
