"""MLflow, off the hot path: the only module that knows it.

    a stage --Tracker--> queue --Recorder (a thread)--> MLflow             started by `dvc repro`
    a stage --Tracker--> socket --Relay--> the flow's Recorder --> MLflow  started by the flow, which imports MLflow once

Importing MLflow and opening its database takes seconds and every call milliseconds, so no stage waits for either: `log` appends to
a queue. When MLflow cannot be reached the Recorder warns once, keeps what it has and tries again; training goes on.
"""

import contextlib
import json
import math
import os
import queue
import re
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from k2.errors import K2Error
from k2.redact import redact

FLUSH_SECONDS = 1.0
RETRY_SECONDS = 5.0
MAX_METRICS = 1000  # MLflow's limit for one log_batch
MAX_PARAMS = 100
SOCKET = "K2_TRACK_SOCKET"  # where the flow listens
SWITCH = "K2_TRACKING"  # "off": no tracking at all
METRIC_NAME = re.compile(r"[\w\-./: ]+")
PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"}


def tracking_uri(configured: str | None, root: Path) -> str:
    """MLFLOW_TRACKING_URI, else execution.tracking_uri, else a SQLite file in `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or configured or f"sqlite:///{root.resolve() / 'mlflow.db'}"


def flatten(tree: Any, at: str = "", separator: str = ".") -> dict[str, Any]:
    """{"sft": {"optim": {"lr": 1}}} as {"sft.optim.lr": 1}; lists stay whole."""
    if not isinstance(tree, dict):
        return {at: tree}
    return {
        k: v for key, sub in tree.items() for k, v in flatten(sub, f"{at}{separator}{key}" if at else str(key), separator).items()
    }


class Tracker:
    """A stage's run in MLflow. `sink(kind, body)` takes the messages; None tracks nothing."""

    def __init__(self, sink: "Recorder | SocketSink | None", **start: Any) -> None:
        self._sink = sink
        self._put("start", name=start.pop("name"), time=_now(), **start)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one point to each curve. NaN and infinity never reach a curve: they are tagged and end the stage (K2Error)."""
        values = {name: float(value) for name, value in metrics.items()}
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        for name in values:
            if not METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric name {name!r}: MLflow takes letters, digits, '_', '-', '.', ' ', ':' and '/'")
        self._put("log", step=int(step), time=_now(), values={k: v for k, v in values.items() if k not in bad})
        if bad:
            self.tag({f"nonfinite.{name}": f"{value} at step {step}" for name, value in bad.items()})
            name, value = next(iter(bad.items()))
            raise K2Error(
                f"{name} is {value} at step {step}; lower the learning rate or look at the data of that step, then run again"
            )

    def text(self, path: str, content: str) -> None:
        """Store a small text (a sample, a log) as an artifact."""
        self._put("text", path=path, content=redact(content))

    def tag(self, tags: dict[str, str]) -> None:
        self._put("tag", tags={key: redact(str(value)) for key, value in tags.items()})

    def register(self, name: str, alias: str, tags: dict[str, str]) -> int:
        """A new version of a registered model that refers to this run, with `alias` moved to it. Waits; K2Error if MLflow refuses.

        Weights live in DVC; the registry holds the reference (`tags`: path, digest). Returns the version, 0 without tracking.
        """
        if self._sink is None:
            return 0
        answer = self._sink.ask("register", {"name": name, "alias": alias, "tags": {k: redact(str(v)) for k, v in tags.items()}})
        if "error" in answer:
            raise K2Error(f"registering {name} in MLflow: {answer['error']}; check MLFLOW_TRACKING_URI and run again")
        return int(answer["version"])

    def end(self, status: str, timeout: float = 20.0) -> None:
        """FINISHED, FAILED or KILLED; waits for what is still on its way, at most `timeout` seconds."""
        self._put("end", status=status, time=_now())
        if self._sink is not None:
            self._sink.close(timeout)
            self._sink = None

    def _put(self, kind: str, **body: Any) -> None:
        if self._sink is not None:
            self._sink.put(kind, body)


def open_tracker(uri: str, experiment: str, root: Path, **start: Any) -> Tracker:
    """The tracker of a stage: through the flow that started it, else on its own. `start`: name, params, tags, inputs."""
    start["params"] = {k: redact(v if isinstance(v, str) else json.dumps(v)) for k, v in flatten(start.get("params", {})).items()}
    start["tags"] = {k: redact(str(v)) for k, v in start.get("tags", {}).items()}
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "false"):
        return Tracker(None, **start)
    if address := os.environ.get(SOCKET):
        with contextlib.suppress(OSError):
            return Tracker(SocketSink(address), **start)
    return Tracker(Recorder(uri, experiment, root), **start)


# -- to the flow ------------------------------------------------------------------------------------------------------------------
class SocketSink:
    """Sends messages as JSON lines to the flow's Relay. Closing without an `end` message means that the stage was killed."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="track-socket", daemon=True)
        self._thread.start()

    def put(self, kind: str, body: dict[str, Any]) -> None:
        self._lines.put(json.dumps([kind, body], allow_nan=False).encode() + b"\n")

    def ask(self, kind: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        self.put(kind, body)
        self._socket.settimeout(timeout)
        try:
            line = self._socket.makefile().readline()
            return json.loads(line) if line else {"error": "the flow has gone"}
        except OSError as error:
            return {"error": f"no answer after {timeout:.0f} s ({error})"}

    def close(self, timeout: float) -> None:
        self._lines.put(None)
        self._thread.join(timeout)
        self._socket.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the flow has gone, and takes this process with it
            while (line := self._lines.get()) is not None:
                self._socket.sendall(line)


class Relay:
    """The flow's ear: a Unix socket whose messages go to the flow's Recorder, each connection one child run of `parent`."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._folder = tempfile.TemporaryDirectory(prefix="k2-")  # a short path: sun_path holds 108 bytes
        self.address = str(Path(self._folder.name) / "track")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(64)
        self._readers: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="track-relay", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(1, sys.maxsize):
                connection, _ = self._listener.accept()
                reader = threading.Thread(target=self._read, args=(connection, f"child {number}"), daemon=True)
                self._readers.append(reader)
                reader.start()

    def _read(self, connection: socket.socket, run: str) -> None:
        last = ""
        with connection, contextlib.suppress(OSError):
            for line in connection.makefile("rb"):
                last, body = json.loads(line)
                if last == "register":
                    answer = self._recorder.ask(last, body, run=run)
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                else:
                    self._recorder.put(last, body | {"parent": "main"} if last == "start" else body, run=run)
        if last != "end":
            self._recorder.put("end", {"status": "KILLED", "time": _now()}, run=run)

    def close(self) -> None:
        """Hear out what ended stages have sent, and stop listening."""
        for reader in self._readers:
            reader.join(5)
        self._listener.close()
        self._folder.cleanup()


# -- to MLflow --------------------------------------------------------------------------------------------------------------------
class Recorder:
    """A thread that owns MLflow's client and brings messages to it in order, each exactly once."""

    def __init__(self, uri: str, experiment: str, root: Path) -> None:
        self.uri, self._experiment, self._root = uri, experiment, root
        self._inbox: queue.SimpleQueue[tuple[str, str, dict[str, Any]]] = queue.SimpleQueue()
        self._pending: deque[tuple[str, str, dict[str, Any]]] = deque()
        self._runs: dict[str, str] = {}  # our name of a run -> MLflow's id
        self._client: Any = None
        self._experiment_id, self._warned, self._closing = "", False, threading.Event()
        self._thread = threading.Thread(target=self._work, name="track-mlflow", daemon=True)
        self._thread.start()

    def put(self, kind: str, body: dict[str, Any], run: str = "main") -> None:
        self._inbox.put((kind, run, body))

    def ask(self, kind: str, body: dict[str, Any], run: str = "main", timeout: float = 120.0) -> dict[str, Any]:
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.put(kind, body | {"answer": answer}, run)
        try:
            return answer.get(timeout=timeout)
        except queue.Empty:
            return {"error": f"{redact(self.uri)} did not answer in {timeout:.0f} s"}

    def close(self, timeout: float) -> None:
        self._closing.set()
        self._inbox.put(("wake", "", {}))
        until = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < until - (
            timeout * 0.8 if self._warned else 0
        ):  # less for a dead server
            self._thread.join(0.05)
        if self._thread.is_alive():
            _warn(f"MLflow at {redact(self.uri)} did not take everything in time; this run's record there is incomplete")

    def _work(self) -> None:
        while not (self._closing.is_set() and self._inbox.empty() and not self._pending):
            self._drain(0.0 if self._closing.is_set() else FLUSH_SECONDS)
            try:
                self._connect()
                while self._pending:
                    self._deliver()
            except Exception as error:  # whatever the network, the server or the database may raise
                if getattr(error, "error_code", None) in PERMANENT:
                    kind, _, body = self._pending.popleft()
                    _warn(f"MLflow refused a `{kind}`: {_line(error)}")
                    if "answer" in body:
                        body["answer"].put({"error": _line(error)})
                else:
                    if not self._warned:
                        _warn(
                            f"MLflow at {redact(self.uri)} cannot be reached ({_line(error)}); going on, it gets everything later"
                        )
                    self._warned = True
                    if self._closing.wait(RETRY_SECONDS):
                        time.sleep(1.0)

    def _drain(self, wait: float) -> None:
        """Take what came, giving points `wait` seconds to gather so that they travel together."""
        until = time.monotonic() + wait
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(timeout=max(0.0, until - time.monotonic())) if wait else self._inbox.get_nowait()
                if message[0] != "wake":
                    self._pending.append(message)
                if message[0] in ("wake", "register"):
                    wait = 0.0

    def _connect(self) -> None:
        if self._client is not None:
            return
        for name, value in {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # the Recorder itself tries again
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
            "MLFLOW_LOGGING_LEVEL": "WARNING",
            "GIT_PYTHON_REFRESH": "quiet",
        }.items():
            os.environ.setdefault(name, value)
        import mlflow

        client = mlflow.MlflowClient(self.uri)
        found = client.get_experiment_by_name(self._experiment)
        if found is None:
            local = (self._root.resolve() / "mlartifacts").as_uri() if self.uri.startswith("sqlite") else None
            self._experiment_id = client.create_experiment(self._experiment, artifact_location=local)
        else:
            self._experiment_id = found.experiment_id
        self._client = client
        self._bury_the_dead()

    def _deliver(self) -> None:
        """Bring the first pending message, and the points right behind it, to MLflow. What raises stays pending."""
        kind, run, body = self._pending[0]
        count = 1
        if kind == "start":
            self._start(run, body)
        elif kind == "open":  # connect early, in the background
            pass
        elif run not in self._runs:
            if "answer" in body:
                body["answer"].put({"error": "the run was not created"})
        elif kind == "log":
            count = self._log(run)
        elif kind == "register":
            body["answer"].put(self._register(self._runs[run], body))
        elif kind == "tag":
            for key, value in body["tags"].items():
                self._client.set_tag(self._runs[run], key, value)
        elif kind == "text":
            self._client.log_text(self._runs[run], body["content"], body["path"])
        elif kind == "link":
            self._link(run, body["stage"], body["fingerprint"])
        elif kind == "end":
            self._client.set_terminated(self._runs[run], body["status"], body["time"])
        for _ in range(count):
            self._pending.popleft()

    def _start(self, run: str, body: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        tags = dict(body.get("tags", {})) | {"mlflow.runName": body["name"], "k2.process": f"{socket.gethostname()}:{os.getpid()}"}
        if (parent := self._runs.get(body.get("parent", ""))) is not None:
            tags["mlflow.parentRunId"] = parent
        if run not in self._runs:  # it is there if only its params or inputs failed
            self._runs[run] = self._client.create_run(self._experiment_id, body["time"], tags).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in body.get("params", {}).items()]
        for i in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._runs[run], params=params[i : i + MAX_PARAMS])
        context = [InputTag("mlflow.data.context", "input")]
        inputs = [
            DatasetInput(Dataset(path, digest[:36], "dvc", json.dumps({"path": path, "md5": digest})), context)
            for path, digest in body.get("inputs", {}).items()
        ]
        if inputs:
            self._client.log_inputs(self._runs[run], inputs)

    def _log(self, run: str) -> int:
        from mlflow.entities import Metric

        metrics, count = [], 0
        for kind, other, body in self._pending:
            if kind != "log" or other != run or (metrics and len(metrics) + len(body["values"]) > MAX_METRICS):
                break
            metrics += [Metric(name, value, body["time"], body["step"]) for name, value in body["values"].items()]
            count += 1
        for i in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._runs[run], metrics=metrics[i : i + MAX_METRICS])  # sent twice, it is stored once
        return count

    def _register(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        name, tags = body["name"], body["tags"]
        with contextlib.suppress(Exception):
            self._client.create_registered_model(name)
        self._client.log_dict(run_id, tags, "model/reference.json")
        version = self._client.create_model_version(name, f"runs:/{run_id}/model", run_id, tags=tags).version
        self._client.set_registered_model_alias(name, body["alias"], version)
        return {"version": int(version)}

    def _link(self, run: str, stage: str, fingerprint: str) -> None:
        """Tag `run` with the newest finished run that computed exactly this stage."""
        query = f"attributes.status = 'FINISHED' and tags.stage = '{stage}' and tags.fingerprint = '{fingerprint}'"
        found = self._client.search_runs([self._experiment_id], query, max_results=1, order_by=["attributes.start_time DESC"])
        if found:
            self._client.set_tag(self._runs[run], f"cached.{stage}", found[0].info.run_id)

    def _bury_the_dead(self) -> None:
        """Runs whose process on this machine was killed outright are still RUNNING: end them."""
        for run in self._client.search_runs([self._experiment_id], "attributes.status = 'RUNNING'"):
            host, _, pid = run.data.tags.get("k2.process", "").rpartition(":")
            if host == socket.gethostname() and not _alive(int(pid)):
                self._client.set_terminated(run.info.run_id, "KILLED")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _now() -> int:
    return int(time.time() * 1000)


def _line(error: BaseException) -> str:
    return redact(" ".join(str(error).split())[:300])


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
