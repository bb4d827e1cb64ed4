"""One run of the recipe, whoever walks it: what it computes where, which children it has, how it is tracked and shown."""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import psutil

from flows.child import Children
from flows.console import Console
from flows.dag import Dag, load_dag
from flows.repro import Outcome, child_environment, headline, repro, stale_stages
from flows.worktree import open_worktree, resolve_params, run_name, save_experiment
from k2.config import Params, load_params, parse_params
from k2.errors import K2Error
from k2.track import SOCKET, SWITCH, Recorder, Relay, tracking_uri
from tasks.stage import Stage, git_commit


@dataclass(frozen=True)
class Request:
    """What was asked for; nothing else distinguishes one run from another."""

    preset: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    from_stage: str | None = None
    to_stage: str | None = None
    stage: str | None = None
    name: str | None = None
    concurrency: int = 2
    retries: int = 0

    @property
    def overridden(self) -> bool:
        return bool(self.preset or self.overrides)


class Run:
    """A context: inside it stages can be run, from several threads; at its end nothing is left behind."""

    def __init__(self, root: Path, request: Request) -> None:
        """Checks params and DAG before anything starts (ConfigError)."""
        self.base, self.request = root.resolve(), request
        self.params: Params = load_params(root / "params.yaml")
        self._text = resolve_params(root, request.preset, request.overrides)
        self.dag: Dag = load_dag(root)
        self.names = self.dag.select(request.from_stage, request.to_stage, request.stage)
        self.name = request.name or run_name(request.preset, request.overrides)
        self.outcomes: dict[str, Outcome] = {}
        self._slots, self._open = Semaphore(request.concurrency), contextlib.ExitStack()

    def __enter__(self) -> "Run":
        with self._open as opening:
            self.children = Children()
            opening.callback(self.children.close)
            self._track(opening)
            self.root = self.base
            if self.request.overridden:
                self.params = parse_params(self._text, "params.yaml with the overrides")
                self.root = opening.enter_context(open_worktree(self.base, self.name, self._text))
            self.stale = stale_stages(self.root, self.names)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        failed = error[0] is not None or any(o.status == "failed" for o in self.outcomes.values())
        status = "KILLED" if error[0] is not None and not issubclass(error[0], Exception) else "FAILED" if failed else "FINISHED"
        self.children.stop()
        self._status = status
        self._open.__exit__(*error)

    @property
    def seconds(self) -> float:
        """Since this process began, imports included: what a person has waited."""
        return time.time() - psutil.Process().create_time()

    def up_to_date(self, stage: str) -> bool:
        """DVC finds nothing to do for it, nor for anything before it."""
        return not ({stage} | self.dag.ancestors(stage)) & self.stale

    def execute(self, stage: str, console: Console) -> Outcome:
        """Bring one stage up to date, its inputs being so, and say how that went."""
        if self.up_to_date(stage):
            outcome = Outcome(stage, "cached")
        else:
            with self._slots:
                console.started(stage)
                log = self.base / ".k2/logs" / (f"{self.name}-{stage}.log" if self.request.overridden else f"{stage}.log")
                command = str(self.dag.stages[stage].get("cmd", ""))
                outcome = repro(
                    self.children, self.root, stage, command, self._environment,
                    lambda text, whole: console.output(stage, text, whole), log,
                )  # fmt: skip
        outcome = replace(outcome, headline=headline(self.root, stage) if outcome.status != "failed" else "")
        self.outcomes[stage] = outcome
        self._track_outcome(outcome)
        if outcome.status != "cached" or stage in self.stale:
            console.ended(outcome)
        return outcome

    def skip(self, stage: str) -> Outcome:
        """A stage before it has failed."""
        return self.outcomes.setdefault(stage, Outcome(stage, "skipped"))

    def finish(self, console: Console) -> None:
        """The end that is worth keeping: an experiment if params were overridden, the report, the table."""
        complete = all(self.outcomes[name].status in ("run", "cached") for name in self.names)
        if complete and self.request.overridden:
            save_experiment(self.root, self.name)
            console.line(f"experiment `{self.name}`: compare with `dvc exp show`, take over with `dvc exp apply {self.name}`")
        title = f"k2flow {self.name}".strip()
        console.table([self.outcomes[name] for name in self.names], self.seconds, self._report(console), title)

    def _report(self, console: Console) -> Path | None:
        """Written in one place, from the metrics files; kept if nothing ran since. A failure of it fails nothing."""
        kept = self.base / "report" / (self.name if self.request.overridden else "") / "index.html"
        if kept.exists() and not any(o.status != "cached" or o.stage in self.stale for o in self.outcomes.values()):
            return kept
        try:
            from k2 import report  # type: ignore[attr-defined]
        except ImportError:
            return None
        try:
            report.write(self.root)
            if self.request.overridden:
                shutil.copytree(self.root / "report", kept.parent, dirs_exist_ok=True)
        except Exception as error:
            console.line(f"the report could not be written: {' '.join(str(error).split())}")
        return kept if kept.exists() else None

    # -- tracking ------------------------------------------------------------------------------------------------------------------
    def _track(self, opening: contextlib.ExitStack) -> None:
        """One parent run for the flow run; stages send theirs to us, so that MLflow is imported once."""
        uri = tracking_uri(self.params.execution.tracking_uri, self.base)
        self._environment = child_environment(MLFLOW_TRACKING_URI=uri)
        self._recorder, self._status = None, "FAILED"
        if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
            return
        self._recorder = recorder = Recorder(uri, self.params.execution.experiment, self.base)
        relay = Relay(recorder)
        self._environment[SOCKET] = relay.address
        tags = {"mlflow.source.name": "flows/pipeline.py", "mlflow.source.git.commit": git_commit(self.base)}
        if self.request.overridden:
            tags["dvc.experiment"] = self.name
        overrides = {"preset": self.request.preset or "params.yaml"} | {key: str(v) for key, v in self.request.overrides.items()}
        recorder.put("start", {"name": self.name or "pipeline", "time": int(time.time() * 1000), "tags": tags, "params": overrides})

        def close() -> None:
            relay.close()
            recorder.put("end", {"status": self._status, "time": int(time.time() * 1000)})
            recorder.close(timeout=30.0 if self._status != "KILLED" else 15.0)  # the stages are gone already

        opening.callback(close)

    def _track_outcome(self, outcome: Outcome) -> None:
        if self._recorder is None:
            return
        now = int(time.time() * 1000)
        if outcome.status == "cached":
            with contextlib.suppress(K2Error, OSError):  # an input is gone: then DVC's own word has to do
                fingerprint = Stage(outcome.stage, self.params, self.root).fingerprint
                self._recorder.put("link", {"stage": outcome.stage, "fingerprint": fingerprint})
        elif outcome.status == "run":
            self._recorder.put("log", {"step": 0, "time": now, "values": {f"seconds/{outcome.stage}": outcome.seconds}})
