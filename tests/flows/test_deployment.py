"""A platform's way in: a real Prefect server, a process work pool and a worker, deployments from prefect.yaml."""

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
DAG = """
stages:
  corpus: {cmd: sh corpus.sh, deps: [corpus.sh], params: [corpus], outs: [data/documents]}
  sft: {cmd: mkdir -p models/sft && touch models/sft/x, deps: [data/documents], params: [sft], outs: [models/sft]}
"""


def api(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url + path, method="GET" if body is None else "POST", headers={"Content-Type": "application/json"},
        data=None if body is None else json.dumps(body).encode(),
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def wait_for(url: str, run: str, *states: str) -> dict[str, Any]:
    until = time.monotonic() + 120
    while (state := api(url, f"/flow_runs/{run}")["state"])["type"] not in states:
        assert time.monotonic() < until, state
        time.sleep(0.3)
    return state


def test_deployed_runs_complete_take_typed_overrides_and_can_be_cancelled(
    make_project: Callable, prefect_api: str, end_group: Callable
):
    """Triggered through the API, the pipeline completes and DVC is content; overrides make an experiment and leave the checkout as
    it was; cancelling leaves no process."""
    project = make_project(DAG, **{"corpus.sh": "mkdir -p data/documents && touch data/documents/x"})
    for room in ("flows", "tasks", "k2"):
        shutil.copytree(ROOT / room, project.root / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "prefect.yaml", project.root)
    project.commit()
    env = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(project.root / ".k2/home"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    project.run(sys.executable, "-m", "prefect", "work-pool", "create", "k2", "--type", "process", **env)
    project.run(sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", **env)
    worker = project.start(sys.executable, "-m", "prefect", "worker", "start", "--pool", "k2", **env)
    end_group(worker)

    def trigger(deployment: str, /, **parameters: Any) -> str:
        known = api(prefect_api, f"/deployments/name/{deployment}")["id"]
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return api(prefect_api, f"/deployments/{known}/create_flow_run", body)["id"]

    def outcome(run: str) -> tuple[str, str]:
        state = wait_for(prefect_api, run, "COMPLETED", "FAILED", "CRASHED")
        return state["type"], state["message"]

    assert outcome(trigger("pipeline/pipeline")) == ("COMPLETED", "2 of 2 stages ran")
    assert "up to date" in project.run("dvc", "status").stdout
    before = project.run("git", "status", "--porcelain").stdout

    seven = trigger("pipeline/pipeline", overrides={"sft.seed": 7}, name="seven")
    assert outcome(seven) == ("COMPLETED", "1 of 2 stages ran")
    assert "seven" in project.run("dvc", "exp", "list").stdout and project.run("git", "status", "--porcelain").stdout == before
    assert outcome(trigger("stage/stage", stage="sft")) == ("COMPLETED", "0 of 1 stages ran")

    project.write(**{"corpus.sh": "sleep 600 & echo $$ $! > pids; wait"})
    run = trigger("pipeline/pipeline")
    until = time.monotonic() + 60
    while not (project.root / "pids").exists() or len((project.root / "pids").read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.2)
    family = [int(pid) for pid in (project.root / "pids").read_text().split()]
    api(prefect_api, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}, "force": False})
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in family):
        assert time.monotonic() < until, "a stage survived its cancellation"
        time.sleep(0.2)
    assert wait_for(prefect_api, run, "CANCELLED", "CRASHED", "FAILED")["type"] == "CANCELLED"
