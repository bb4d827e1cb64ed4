"""What a stage of dvc.yaml sees: its deps, outs, params and nothing else.

    def main(stage: Stage) -> None: ...

    if __name__ == "__main__":
        run("pretrain", main)

Paths and params stand in dvc.yaml alone: a task asks for them by their last name (`stage.dep("tokens")`), and asking for what the
stage does not declare fails, so that a forgotten dependency is impossible.
"""

import hashlib
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from k2 import storage, track
from k2.config import ExecutionConfig, Params, load_params
from k2.errors import ConfigError, K2Error

RESUME = Path(".k2/resume")
TERMINATED = 128 + signal.SIGTERM  # exit code of a stage that was cancelled
MADE = ("outs", "metrics", "plots")  # what a stage makes, by its kinds in dvc.yaml


class Declared:
    """The sections of params.yaml that a stage declares; any other is refused."""

    def __init__(self, stage: str, params: Params, sections: list[str]) -> None:
        for section in sections:
            if not hasattr(params, section):
                raise ConfigError(f"dvc.yaml: stages.{stage}.params lists `{section}`, which is no section of params.yaml")
        self._stage, self._sections = stage, {name: getattr(params, name) for name in sections}

    def __getattr__(self, section: str) -> Any:
        try:
            return self._sections[section]
        except KeyError:
            raise ConfigError(
                f"dvc.yaml: stages.{self._stage}.params does not list `{section}`, which the task reads; add it"
            ) from None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._sections.items())


class Stage:
    """One entry of dvc.yaml, bound to the params and the folders that it names. `tracker` is its run in MLflow."""

    tracker: track.Tracker

    def __init__(self, name: str, params: Params | None = None, root: Path = Path()) -> None:
        stages, self._root = read_dag(root), root
        if name not in stages:
            raise ConfigError(f"dvc.yaml: stages.{name} is not there; known stages: {', '.join(stages)}")
        entry, self.name = stages[name], name
        params = params or load_params(root / "params.yaml")
        self.params: Any = Declared(name, params, entry.get("params", []))
        self.execution: ExecutionConfig = params.execution
        made = {path for other in stages.values() for kind in MADE for path in paths(other, kind)}
        self.inputs = [Path(p) for p in paths(entry, "deps") if p in made]  # what other stages make; the rest of deps is code
        self._outs = [Path(p) for kind in MADE for p in paths(entry, kind)]
        self._open = ExitStack()

    def dep(self, name: str) -> Path:
        """An input made by another stage, its checksums verified."""
        path = self._find(self.inputs, name, "deps")
        if not path.exists():
            raise K2Error(f"{path}: missing; run `dvc repro {self.name}`, which makes what this stage needs first")
        return storage.verify(path) if path.is_dir() else path

    def out(self, name: str) -> Path:
        """Where to write an output: a new empty folder, renamed to its place when the whole stage succeeds."""
        partial = self._open.enter_context(storage.write_whole(self._find(self._outs, name, "outs")))
        partial.mkdir()
        return partial

    def write(self, name: str, text: str) -> None:
        """Write a metrics or plots file, whole, by its name in dvc.yaml (`pretrain.json`)."""
        with storage.write_whole(self._find(self._outs, name, "outs, metrics or plots")) as partial:
            partial.write_text(text)

    def metrics(self, values: dict[str, Any]) -> None:
        """Write the stage's metrics file, metrics/<stage>.json. The first number in it is the stage's headline."""
        for name, value in track.flatten(values).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise K2Error(f"metrics/{self.name}.json: {name} is {value}; the result is not usable, look at the stage's curves")
        self.write(f"{self.name}.json", json.dumps(values, indent=1) + "\n")

    @property
    def fingerprint(self) -> str:
        """Identity of what this stage computes: resolved params and content of inputs, not where or by which code it runs."""
        digest = hashlib.sha256(self.name.encode())
        for section, value in self.params:
            digest.update(f"{section}={value!r}".encode())
        for path in sorted(self.inputs):
            file = self._root / path / storage.MANIFEST if (self._root / path).is_dir() else self._root / path
            if not file.exists():
                raise K2Error(
                    f"{path}: missing or unfinished; run `dvc repro {self.name}`, which makes what this stage needs first"
                )
            digest.update(f"{path}:{storage.sha256(file)}".encode())
        return digest.hexdigest()[:16]

    @property
    def resume_folder(self) -> Path:
        """Where resume states of exactly this computation lie; removed when the stage succeeds."""
        return RESUME / self.name / self.fingerprint

    def __enter__(self) -> "Stage":
        uri = track.tracking_uri(self.execution.tracking_uri, Path.cwd())
        params = {section: asdict(value) for section, value in self.params}
        inputs = self.input_hashes()
        tags = {"stage": self.name, "mlflow.source.git.commit": git_commit(), "mlflow.source.name": f"tasks/{self.name}.py"}
        with suppress(K2Error):  # an input is missing: `dep` will say so
            tags["fingerprint"] = self.fingerprint
        tags |= {f"dvc.{path}": digest for path, digest in inputs.items()}
        self.tracker = track.open_tracker(
            uri, self.execution.experiment, Path.cwd(), name=self.name, params=params, tags=tags, inputs=inputs
        )
        return self

    def __exit__(self, *error: Any) -> None:
        killed = isinstance(error[1], KeyboardInterrupt) or getattr(error[1], "code", None) == TERMINATED
        status = "FINISHED" if error[0] is None else "KILLED" if killed else "FAILED"
        try:
            self._open.__exit__(*error)
            if error[0] is None:
                with suppress(K2Error):  # an input that was declared but neither read nor there
                    storage.remove(self.resume_folder)
                self._track_metrics()
            elif error[1] is not None:
                self.tracker.tag({"error": str(error[1])[:500]})
        except BaseException:
            status = "FAILED"
            raise
        finally:
            self.tracker.end(status, timeout=5.0 if status == "KILLED" else 30.0)

    def _track_metrics(self) -> None:
        """The numbers of the metrics file, as MLflow metrics under final/."""
        for path in (p for p in self._outs if p.parts[0] == "metrics" and p.suffix == ".json" and p.exists()):
            numbers = track.flatten(json.loads(path.read_text()), separator="/")
            named = {f"final/{re.sub(r'[^a-zA-Z0-9_./ -]', '_', k)}": v for k, v in numbers.items() if type(v) in (int, float)}
            self.tracker.log(0, named)

    def input_hashes(self) -> dict[str, str]:
        """DVC's hash of each input, from dvc.lock, where the stages that made them stand."""
        known: dict[str, str] = {}
        with suppress(OSError, yaml.YAMLError, KeyError, TypeError):
            lock = yaml.load(Path("dvc.lock").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            known = {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage.get("outs", [])}
        return {path.as_posix(): known[path.as_posix()] for path in self.inputs if path.as_posix() in known}

    def _find(self, among: list[Path], name: str, kind: str) -> Path:
        for path in among:
            if name in (path.name, path.as_posix()):
                return path
        raise ConfigError(f"dvc.yaml: stages.{self.name} does not list `{name}` under {kind}, which the task asks for; add it")


def read_dag(root: Path = Path()) -> dict[str, dict[str, Any]]:
    """The stages of dvc.yaml, as they stand there."""
    try:
        return dict(yaml.safe_load((root / "dvc.yaml").read_text())["stages"])
    except FileNotFoundError:
        raise ConfigError("dvc.yaml: not found; run from the project's root") from None
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"dvc.yaml: not valid: {' '.join(str(error).split())}") from None


def paths(entry: dict[str, Any], kind: str) -> list[str]:
    """The paths under `deps`, `outs`, `metrics` or `plots` of a stage, whether written plain or with options."""
    return [next(iter(item)) if isinstance(item, dict) else item for item in entry.get(kind) or []]


def git_commit(root: Path = Path()) -> str:
    """The commit that is checked out, empty outside git."""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def run(name: str, main: Callable[[Stage], None]) -> None:
    """Run a stage's `main` as a process: user errors are one line on stderr and an exit code, never a traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # cancelled: leave by the same doors as an error
    try:
        with Stage(name) as stage:
            main(stage)
    except K2Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("k2", "tasks"):
            raise
        print(f"{name}: the package of `{error.name}` is not installed; run `make setup`", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not storage.disk_is_full(error):
            raise
        place = getattr(error, "filename", None) or Path.cwd()
        print(f"{name}: {place}: the disk is full; free some space and run again", file=sys.stderr)
        sys.exit(1)
