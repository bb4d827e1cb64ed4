"""One stage through DVC: `dvc repro --single-item` as a child, its talk filtered, its busy lock waited for, its end understood."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.child import Children, Chunk
from k2.errors import ConfigError
from k2.redact import redact
from k2.track import flatten

CHATTER = re.compile(
    r"\s*$|Running stage '|(Updating|Generating) lock file|Stage '.*' (didn't change|is cached)|Verifying data sources"
    r"|To track the changes with git|\tgit add|To enable auto staging|\tdvc config core.autostage|Use `dvc push`"
    r"|Data and pipelines are up to date"
)
BUSY = re.compile(r"Unable to acquire lock|is busy, it is being blocked by|Cannot acquire lock", re.IGNORECASE)
EXITED = re.compile(r"exited with (-?\d+)")
WAIT_SECONDS = 2.0
DVC = (sys.executable, "-P", "-m", "dvc")  # -P: whatever lies in the project's root is not DVC's to import


@dataclass(frozen=True)
class Outcome:
    """How a stage went: `status` is run, cached, failed or skipped; `error` one line; `headline` its first metric."""

    stage: str
    status: str
    seconds: float = 0.0
    error: str = ""
    exit_code: int = 0
    headline: str = ""


def stale_stages(root: Path, names: list[str]) -> set[str]:
    """Which of the stages DVC would have to look at: one call for all. When DVC's lock is taken, every one."""
    done = subprocess.run([*DVC, "status", "--json", *names], cwd=root, capture_output=True, text=True, env=child_environment())
    if done.returncode == 0:
        return set(json.loads(done.stdout)) & set(names)
    if BUSY.search(done.stderr):
        return set(names)
    raise ConfigError(f"dvc.yaml: {_one_line(done.stderr.removeprefix('ERROR: '))}")


def repro(children: Children, root: Path, stage: str, command: str, env: dict[str, str], on_output: Chunk, log: Path) -> Outcome:
    """Bring one stage up to date. Its whole output goes to `log`; what is worth seeing to `on_output`."""
    started, waiting_for = time.monotonic(), ""
    while True:
        talk = _Talk(command, on_output)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as file:
            arguments = ["--wait-for-lock", "repro", "--single-item", stage]
            code = children.run([*DVC, *arguments], root, env, lambda text, whole: talk.hear(text, whole, file))  # noqa: B023
        seconds = time.monotonic() - started
        if code == 0:
            return Outcome(stage, "run" if talk.ran else "cached", seconds)
        if children.stopped:
            return Outcome(stage, "failed", seconds, "cancelled", 143)
        if not BUSY.search(talk.dvc_error) or talk.ran:
            return _failure(stage, talk, code, seconds, log)
        holder = lock_holder(root, talk.dvc_error)
        if holder != waiting_for and seconds > WAIT_SECONDS:
            waiting_for = holder
            on_output(f"waiting: DVC's lock is held by {holder}", True)
        time.sleep(WAIT_SECONDS)


def lock_holder(root: Path, message: str) -> str:
    """Who blocks us: from DVC's message, which names processes, or from the lock file, which holds a process id."""
    blockers = re.findall(r"\(PID (\d+)\): (.+?)(?= \(PID|\n|$| If there)", message)
    if not blockers:
        try:
            blockers = [((root / ".dvc/tmp/lock").read_text().split()[0], "dvc")]
        except (OSError, IndexError):
            return "another DVC process"
    return " and ".join(f"`{command.strip()}` (process {pid}{_hint(root, int(pid))})" for pid, command in blockers)


def headline(root: Path, stage: str) -> str:
    """The first number of metrics/<stage>.json, which is the one that a stage declares as its most telling."""
    try:
        numbers = flatten(json.loads((root / "metrics" / f"{stage}.json").read_text()))
        name, value = next((k, v) for k, v in numbers.items() if type(v) in (int, float))
    except (OSError, ValueError, StopIteration):
        return ""
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"


class _Talk:
    """Tells DVC's own lines from the stage's, and remembers what an error needs."""

    def __init__(self, command: str, on_output: Callable[[str, bool], None]) -> None:
        self._command, self._on_output = command, on_output
        self.ran, self._crashed, self.dvc_error, self.lines = False, False, "", deque[str](maxlen=50)

    def hear(self, text: str, whole: bool, file: Any) -> None:
        text = redact(text)
        if not whole:
            self._on_output(text, False)
            return
        file.write(text + "\n")
        file.flush()
        self.ran = self.ran or text.startswith("Running stage '")
        if text.startswith("ERROR: ") or self.dvc_error:
            self.dvc_error += text + "\n"
        elif not CHATTER.match(text) and text != f"> {self._command}":
            self.lines.append(text)
            self._crashed = self._crashed or text.startswith("Traceback (most recent call last)")
            if not self._crashed:  # the log has it; a person gets the last line
                self._on_output(text, True)


def _failure(stage: str, talk: _Talk, code: int, seconds: float, log: Path) -> Outcome:
    """The stage's own one-line error if it has one (`stage: ...`), else its last line, else DVC's."""
    if exited := EXITED.search(talk.dvc_error):
        code = int(exited[1])
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        cause = "killed by the system, out of memory?" if name == "SIGKILL" else "ended from outside"
        return Outcome(
            stage, "failed", seconds, f"{stage}: {name}: {cause}; run again to go on from its last saved step", 128 + number
        )
    own = [line for line in talk.lines if line.startswith(f"{stage}: ")]
    dvc = " ".join(talk.dvc_error.removeprefix("ERROR: ").split()).removeprefix(f"failed to reproduce '{stage}': ")
    if own:
        return Outcome(stage, "failed", seconds, own[-1], code)
    if exited and talk.lines:
        return Outcome(stage, "failed", seconds, f"{stage}: {talk.lines[-1].strip()} (all of it: {log})", code)
    return Outcome(stage, "failed", seconds, f"{stage}: {dvc or f'exit code {code}'}", code)


def _hint(root: Path, pid: int) -> str:
    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ", which has ended"
    if not any("dvc" in part for part in command):
        return f", which is no DVC: if it is none of yours, delete {root / '.dvc/tmp/rwlock'}"
    return ""


def _one_line(text: str) -> str:
    return redact(" ".join(text.split()))


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a stage: this interpreter is `python`, output comes at once, DVC stays quiet about itself."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1"} | more
