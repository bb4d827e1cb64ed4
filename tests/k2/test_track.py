"""MLflow's record of a stage: curves, params, tags, inputs, ends; in a real SQLite store and on a real server."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k2.errors import K2Error
from k2.redact import redact
from k2.track import Recorder, Relay, Tracker, flatten, open_tracker, tracking_uri


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty MLflow database to copy: making one takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    Tracker(Recorder(f"sqlite:///{folder}/mlflow.db", "none", folder), name="first").end("FINISHED", timeout=120)
    return folder / "mlflow.db"


@pytest.fixture
def store(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of MLflow, tracking on."""
    monkeypatch.setenv("K2_TRACKING", "on")
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def runs(uri: str, experiment: str = "k2flow") -> dict[str, Any]:
    """All runs of an experiment by name."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return {} if found is None else {str(run.info.run_name): run for run in client.search_runs([found.experiment_id])}


def history(uri: str, run: Any, metric: str) -> list[tuple[int, float]]:
    import mlflow

    return [(point.step, point.value) for point in mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, metric)]


def test_two_runs_have_their_curves_params_tags_and_inputs(store: str, tmp_path: Path):
    """Every point once and in order, under one name in both runs, so that two learning rates compare on the same axes."""
    for lr in (1e-3, 2e-3):
        tracker = open_tracker(
            store, "k2flow", tmp_path, name=f"sft {lr}", tags={"stage": "sft", "dvc.data/tokens": "0123abcd.dir"},
            params={"sft": {"optim": {"lr": lr}, "styles": ["a", "b"], "path": None}}, inputs={"data/tokens": "0123abcd.dir"},
        )  # fmt: skip
        for step in range(1500):  # more than one batch of MLflow's
            tracker.log(step, {"train/loss": lr * step, "optim/lr": lr})
        tracker.text("samples/sft.txt", "two plus two is four")
        tracker.end("FINISHED")
    found = runs(store)
    for lr in (1e-3, 2e-3):
        run = found[f"sft {lr}"]
        assert history(store, run, "train/loss") == [(step, lr * step) for step in range(1500)]
        assert run.data.params == {"sft.optim.lr": str(lr), "sft.styles": '["a", "b"]', "sft.path": "null"}
        assert run.data.tags["stage"] == "sft" and run.data.tags["dvc.data/tokens"] == "0123abcd.dir"
        (dataset,) = run.inputs.dataset_inputs
        assert (dataset.dataset.name, dataset.dataset.digest) == ("data/tokens", "0123abcd.dir")
        assert run.info.status == "FINISHED"
    assert [p.read_text() for p in (tmp_path / "mlartifacts").rglob("sft.txt")] == ["two plus two is four"] * 2


def test_nan_reaches_no_curve_but_a_tag_and_stops_the_stage(store: str, tmp_path: Path):
    """The finite metrics of that step stay; the other is named with its step; the run's page stays readable."""
    tracker = open_tracker(store, "k2flow", tmp_path, name="nan")
    tracker.log(1, {"train/loss": 2.0, "optim/lr": 0.1})
    with pytest.raises(K2Error, match="train/loss is nan at step 2; lower the learning rate"):
        tracker.log(2, {"train/loss": math.nan, "optim/lr": 0.1})
    with pytest.raises(ValueError, match=r"metric name 'loss\[0\]'"):
        tracker.log(2, {"loss[0]": 1.0})
    tracker.end("FAILED")
    run = runs(store)["nan"]
    assert history(store, run, "train/loss") == [(1, 2.0)] and history(store, run, "optim/lr") == [(1, 0.1), (2, 0.1)]
    assert run.data.tags["nonfinite.train/loss"] == "nan at step 2" and run.info.status == "FAILED"


def test_children_of_a_flow_come_through_its_relay(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two stages at once get child runs of one parent; one that is killed ends as KILLED; a cached one is linked to its maker."""
    recorder = Recorder(store, "k2flow", tmp_path)
    recorder.put("start", {"name": "flow", "time": 1, "tags": {}})
    relay = Relay(recorder)
    monkeypatch.setenv("K2_TRACK_SOCKET", relay.address)
    one = open_tracker("unused", "unused", tmp_path, name="one", tags={"stage": "one", "fingerprint": "f00"})
    two = open_tracker("unused", "unused", tmp_path, name="two", tags={"stage": "two"})
    for step in range(50):
        one.log(step, {"loss": step})
        two.log(step, {"loss": -step})
    one.end("FINISHED")
    two.end("FAILED")
    script = "import os, time; from pathlib import Path; from k2.track import open_tracker; t = open_tracker('', '', Path(), name='three'); t.log(7, {'loss': 1.0}); time.sleep(0.5); os.kill(os.getpid(), 9)"  # noqa: E501
    subprocess.run([sys.executable, "-c", script], check=False)
    relay.close()
    recorder.put("link", {"stage": "one", "fingerprint": "f00"})
    recorder.put("end", {"status": "FINISHED", "time": 2})
    recorder.close(60)
    found = runs(store)
    parent = found["flow"].info.run_id
    assert {name: run.info.status for name, run in found.items()} == {
        "flow": "FINISHED", "one": "FINISHED", "two": "FAILED", "three": "KILLED",
    }  # fmt: skip
    assert all(found[name].data.tags["mlflow.parentRunId"] == parent for name in ("one", "two", "three"))
    assert history(store, found["one"], "loss") == [(s, s) for s in range(50)]
    assert history(store, found["two"], "loss") == [(s, -s) for s in range(50)]
    assert history(store, found["three"], "loss") == [(7, 1.0)]
    assert found["flow"].data.tags["cached.one"] == found["one"].info.run_id


@pytest.fixture
def server(database: Path, tmp_path: Path) -> Iterator[Callable[[], tuple[str, subprocess.Popen]]]:
    """Starts a real MLflow server, on the same port each time."""
    shutil.copy(database, tmp_path / "server.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[subprocess.Popen] = []

    def start() -> tuple[str, subprocess.Popen]:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "files")]
        with open(tmp_path / "server.log", "a") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True))
        return f"http://127.0.0.1:{port}", started[-1]

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def test_an_unreachable_server_costs_a_warning_and_nothing_else(
    server: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    """Training goes on while the server is down; when it comes, it gets every point; a model is registered with its alias."""
    monkeypatch.setenv("K2_TRACKING", "on")
    monkeypatch.setattr("k2.track.RETRY_SECONDS", 0.5)
    uri, process = server()
    process.kill()
    process.wait()
    tracker = open_tracker(uri, "k2flow", tmp_path, name="patient")
    started = time.monotonic()
    for step in range(100):
        tracker.log(step, {"loss": step})
    assert time.monotonic() - started < 0.5
    until = time.monotonic() + 60
    while not (warning := capfd.readouterr().err):
        assert time.monotonic() < until
        time.sleep(0.1)
    server()
    assert tracker.register("k2-test", "candidate", {"dvc.path": "models/published", "sha256": "abc"}) == 1
    tracker.end("FINISHED", timeout=60)
    assert "cannot be reached" in warning and (warning + capfd.readouterr().err).count("warning:") == 1
    assert history(uri, runs(uri)["patient"], "loss") == [(step, step) for step in range(100)]
    import mlflow

    version = mlflow.MlflowClient(uri, uri).get_model_version_by_alias("k2-test", "candidate")
    assert version.tags["dvc.path"] == "models/published" and version.run_id == runs(uri)["patient"].info.run_id


def test_a_run_whose_process_has_died_does_not_stay_running(store: str, tmp_path: Path):
    """kill -9 of a stage that stood alone: the next one to open this store ends its run as KILLED."""
    script = "import os, sys, time; from pathlib import Path; from k2.track import open_tracker; t = open_tracker(sys.argv[1], 'k2flow', Path(), name='dead'); t.log(1, {'loss': 1.0}); time.sleep(0.1)\nwhile not t._sink._runs: time.sleep(0.1)\nos.kill(os.getpid(), 9)"  # noqa: E501
    subprocess.run([sys.executable, "-c", script, store], check=False)
    assert runs(store)["dead"].info.status == "RUNNING"
    open_tracker(store, "k2flow", tmp_path, name="next").end("FINISHED")
    assert runs(store)["dead"].info.status == "KILLED"


def test_secrets_reach_nothing(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither credentials in URLs nor the values of variables named like secrets, in params, tags, texts or the database at all."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    assert redact("http://user:pa55word@host/v1?x=1&api_key=zzzz") == "http://***@host/v1?x=1&api_key=***"
    tracker = open_tracker(
        store,
        "k2flow",
        tmp_path,
        name="secret",
        tags={"note": "Bearer sk-very-secret"},
        params={"llm": {"base_url": "http://u:pa55word@h/"}},
    )
    tracker.text("log.txt", "called with sk-very-secret")
    tracker.tag({"error": "401 for sk-very-secret at http://u:pa55word@h/"})
    tracker.end("FAILED")
    assert runs(store)["secret"].data.params["llm.base_url"] == "http://***@h/"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"very-secret" not in path.read_bytes() and b"pa55word" not in path.read_bytes(), path


def test_the_address_is_the_environments_then_the_configured_then_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MLFLOW_TRACKING_URI, execution.tracking_uri, sqlite beside params.yaml, in this order."""
    assert tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert tracking_uri("http://configured", tmp_path) == "http://configured"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert tracking_uri("http://configured", tmp_path) == "http://environment"


def test_flatten_names_leaves_by_their_path():
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None}) == {"a.b": 1, "a.c.d": [1, 2], "e": None}
    assert json.dumps(flatten({"a": {"b": 1}}, separator="/")) == '{"a/b": 1}'
