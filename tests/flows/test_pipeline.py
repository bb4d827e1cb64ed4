"""`python -m flows.pipeline` on toy recipes: real git, DVC and Prefect, stages of a second."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mlflow
import psutil
import pytest

from flows.cli import main

STAGE = """
import sys, time
from k2.progress import bar
from tasks.stage import run
def main(stage):
    name = stage.name
    for path in stage.inputs:
        stage.dep(path.name)
    with bar(name, 4, "it") as progress:
        for _ in range(4):
            time.sleep(0.2)
            progress.update(1)
    (stage.out(stage._outs[0].name) / "x").write_text(name)
    stage.metrics({"loss": 0.5, "steps": 4})
run(sys.argv[1], main)
"""
CHAIN = """
stages:
  corpus: {cmd: python stage.py corpus, deps: [stage.py], params: [corpus], outs: [data/documents], metrics: [metrics/corpus.json]}
  tools: {cmd: python stage.py tools, deps: [stage.py], params: [tools], outs: [data/tools], metrics: [metrics/tools.json]}
  sft:
    cmd: python stage.py sft
    deps: [stage.py, data/documents, data/tools]
    params: [sft]
    outs: [models/sft]
    metrics: [metrics/sft.json]
  rl: {cmd: python stage.py rl, deps: [stage.py, models/sft], params: [rl], outs: [models/rl], metrics: [metrics/rl.json]}
"""
SLEEPER = """
import os, subprocess, sys, time
from tasks.stage import run
def main(stage):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pids", "w").write(f"{os.getpid()} {child.pid} {os.getppid()} ")
    time.sleep(600)
run("corpus", main)
"""
SLEEP = "stages: {corpus: {cmd: python sleep.py, deps: [sleep.py], params: [corpus], outs: [data/documents]}}"


def statuses(text: str) -> dict[str, str]:
    """The table's stage and status columns."""
    return dict(re.findall(r"^(\w+) +[\d.-]+ +(run|cached|failed|skipped)\b", text, re.MULTILINE))


def cpu_seconds() -> float:
    """Of all processes started here that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tracked(project: Any) -> list[dict[str, Any]]:
    """What MLflow knows, the newest run first."""
    client = mlflow.MlflowClient(f"sqlite:///{project.root}/mlflow.db")
    found = client.get_experiment_by_name("k2flow")
    assert found is not None
    return [
        {
            "id": run.info.run_id, "name": run.info.run_name, "status": run.info.status, "tags": run.data.tags,
            "parent": run.data.tags.get("mlflow.parentRunId"), "commit": run.data.tags.get("mlflow.source.git.commit"),
            "metrics": run.data.metrics,
            "inputs": sorted(i.dataset.name for i in (run.inputs.dataset_inputs if run.inputs else [])),
        }
        for run in client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"])
    ]  # fmt: skip


def test_both_front_doors_do_the_same_work(make_project: Callable):
    """After the flow DVC finds nothing to do, after DVC the flow; the cached run says so and is fast; only what changed runs."""
    project = make_project(CHAIN, **{"stage.py": STAGE})
    first = project.pipeline(K2_TRACKING="on")  # with the temporary server: its very first start
    assert statuses(first.stdout) == dict.fromkeys(["corpus", "tools", "sft", "rl"], "run")
    assert "loss 0.5" in first.stdout and "it/s" in first.stderr
    assert "up to date" in project.run("dvc", "status").stdout

    before = cpu_seconds()  # not the clock: this machine may be busy with other things
    second = project.pipeline(K2_TRACKING="on")
    assert statuses(second.stdout) == dict.fromkeys(["corpus", "tools", "sft", "rl"], "cached")
    assert "everything is up to date" in second.stdout
    assert cpu_seconds() - before < 15
    runs = tracked(project)
    parents = [run for run in runs if run["name"] == "pipeline"]
    assert {run["name"] for run in runs if run["parent"] == parents[1]["id"]} == {"corpus", "tools", "sft", "rl"}
    assert {run["status"] for run in runs} == {"FINISHED"}
    sft = next(run for run in runs if run["name"] == "sft")
    assert parents[0]["tags"]["cached.sft"] == sft["id"]  # the cached run points at what made it
    assert sft["tags"]["stage"] == "sft" and {"dvc.data/documents", "dvc.data/tools"} <= set(sft["tags"]) and sft["commit"]
    assert sft["metrics"]["final/loss"] == 0.5 and sft["inputs"] == ["data/documents", "data/tools"]

    project.edit("params.yaml", "rl:\n  steps: ", "rl:\n  steps: 1")
    project.run("dvc", "repro")
    assert set(statuses(project.pipeline().stdout).values()) == {"cached"}
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(project.root) in " ".join(p.info["cmdline"] or [])]


def test_independent_branches_run_side_by_side_and_a_knob_reruns_only_what_follows(make_project: Callable, prefect_api: str):
    """corpus and tools overlap in time; after a change of sft's section only sft and rl run; --to and --stage select."""
    project = make_project(CHAIN, **{"stage.py": STAGE})
    done = project.pipeline("--to", "sft", PREFECT_API_URL=prefect_api)
    order = re.findall(r"^([>=]) (\w+)", done.stderr, re.MULTILINE)
    assert {order[0][1], order[1][1]} == {"corpus", "tools"} and order[0][0] == order[1][0] == ">"  # both began before one ended
    assert statuses(done.stdout) == dict.fromkeys(["corpus", "tools", "sft"], "run")
    project.edit("params.yaml", "sft:\n  tokens: ", "sft:\n  tokens: 1")
    expected = {"corpus": "cached", "tools": "cached", "sft": "run", "rl": "run"}
    assert statuses(project.pipeline(PREFECT_API_URL=prefect_api).stdout) == expected
    assert statuses(project.pipeline("--stage", "rl", PREFECT_API_URL=prefect_api).stdout) == {"rl": "cached"}


def test_a_failed_stage_ends_in_one_line_and_its_own_exit_code(make_project: Callable, prefect_api: str):
    """A user error, a crash and a kill: each gives one line, no traceback; what follows is skipped, the other branch is not."""
    project = make_project(CHAIN, **{"stage.py": STAGE})
    project.edit("stage.py", "    name = stage.name\n", "    name = stage.name\n    if name == 'corpus': stage.params.rl\n")
    failed = project.pipeline(check=False, PREFECT_API_URL=prefect_api)
    assert failed.returncode == 2  # ConfigError's
    assert "corpus: dvc.yaml: stages.corpus.params does not list `rl`" in failed.stderr
    assert "Traceback" not in failed.stderr + failed.stdout
    assert statuses(failed.stdout) == {"corpus": "failed", "tools": "run", "sft": "skipped", "rl": "skipped"}

    project.edit("stage.py", "stage.params.rl", "1 / 0")
    crashed = project.pipeline("--stage", "corpus", check=False, PREFECT_API_URL=prefect_api)
    assert crashed.returncode == 1 and "corpus: ZeroDivisionError: division by zero (all of it: " in crashed.stderr
    assert "Traceback" not in crashed.stderr
    assert "Traceback" in (project.root / ".k2/logs/corpus.log").read_text()

    project.edit("stage.py", "1 / 0", "__import__('os').kill(__import__('os').getpid(), 9)")
    killed = project.pipeline("--stage", "corpus", check=False, PREFECT_API_URL=prefect_api)
    assert killed.returncode == 128 + 9 and "corpus: SIGKILL: killed by the system, out of memory?" in killed.stderr


def test_retries_are_for_failures_that_may_pass(make_project: Callable, prefect_api: str):
    """A stage that was killed is run again, one that is configured wrongly is not."""
    body = "    name = stage.name\n    import os, pathlib\n    tries = pathlib.Path('tries')\n"
    body += "    n = len(tries.read_text()) if tries.exists() else 0\n"
    body += "    tries.write_text('x' * (n + 1))\n    if n == 0: os.kill(os.getpid(), 9)\n    if name == 'tools': stage.params.rl\n"
    project = make_project(CHAIN, **{"stage.py": STAGE.replace("    name = stage.name\n", body)})
    done = project.pipeline("--stage", "corpus", "--retries", "1", PREFECT_API_URL=prefect_api)
    assert statuses(done.stdout) == {"corpus": "run"} and "corpus: SIGKILL" in done.stderr
    done = project.pipeline("--stage", "tools", "--retries", "3", check=False, PREFECT_API_URL=prefect_api)
    assert done.returncode == 2 and (project.root / "tries").read_text() == "xxx"


def test_a_typo_stops_at_once_with_exit_2(make_project: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Before anything starts: one line with the key's path and what was expected. Presets, --set and --from are checked alike."""
    project = make_project(CHAIN, **{"stage.py": STAGE})
    original = (project.root / "params.yaml").read_text()
    project.edit("params.yaml", "sft:\n  tokens:", "sft:\n  tokenz:")
    done = project.pipeline(check=False)  # once as a process
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "params.yaml: sft.tokenz: unknown key; did you mean `tokens`?" in done.stderr

    monkeypatch.chdir(project.root)
    for params, arguments, expected in (
        (original.replace("rl:\n  steps: ", "rl:\n  steps: many"), [], "params.yaml: rl.steps: expected int, got many"),
        (original, ["--preset", "huge"], "preset `huge` is not known; there are: micro"),
        (original, ["--set", "sft.optim.lrr=1"], "params.yaml with the overrides: sft.optim.lrr: unknown key; did you mean `lr`?"),
        (original, ["--set", "sft.seed=x"], "sft.seed: expected int, got x"),
        (original, ["--set", "a.b.c=1"], "a.b.c: no such key in params.yaml"),
        (original, ["--from", "sfft"], "stage `sfft` is not in dvc.yaml; did you mean `sft`?"),
    ):
        project.write(**{"params.yaml": params})
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as end:
        main(["--set", "nothing"])
    assert end.value.code == 2 and "write section.key=value" in capsys.readouterr().err
    assert not (project.root / "data").exists() and not (project.root / ".k2").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_flow_ends_no_process_is_left_within_ten_seconds(
    make_project: Callable, prefect_api: str, number: int, end_group: Callable
):
    """Ctrl-C, a scheduler's SIGTERM and kill -9: the stage, what it started and DVC are gone, the next run is not locked out."""
    project = make_project(SLEEP, **{"sleep.py": SLEEPER})
    track = "on" if number == signal.SIGTERM else "off"
    flow = project.start(sys.executable, "-m", "flows.pipeline", PREFECT_API_URL=prefect_api, K2_TRACKING=track)
    end_group(flow)
    until = time.monotonic() + 90
    while not (project.root / "pids").exists() or not (project.root / "pids").read_text().endswith(" "):
        assert time.monotonic() < until and flow.poll() is None, flow.communicate()[0]
        time.sleep(0.1)
    family = [int(pid) for pid in (project.root / "pids").read_text().split()]
    os.kill(flow.pid, number)
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in family):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.1)
    output, _ = flow.communicate(timeout=30)
    assert flow.returncode == {int(signal.SIGINT): 130, int(signal.SIGTERM): 143, int(signal.SIGKILL): -9}[number], output
    assert "Traceback" not in output
    if number == signal.SIGTERM:
        assert {run["name"]: run["status"] for run in tracked(project)} == {"pipeline": "KILLED", "corpus": "KILLED"}
    if number == signal.SIGKILL:  # the rudest way: not even DVC could tidy up its locks
        project.write(
            **{"sleep.py": "from tasks.stage import run\nrun('corpus', lambda stage: (stage.out('documents') / 'x').touch())"}
        )
        assert statuses(project.pipeline(PREFECT_API_URL=prefect_api).stdout) == {"corpus": "run"}


def test_a_busy_lock_is_waited_for_and_its_holder_named(make_project: Callable, prefect_api: str, end_group: Callable):
    """Someone's `dvc repro` of the same stage is running: the flow says who, waits, and then finds the stage done."""
    script = "touch started; while [ ! -e go ]; do sleep 0.2; done; mkdir -p data/documents; touch data/documents/x"
    dag = "stages: {corpus: {cmd: sh slow.sh, deps: [slow.sh], params: [corpus], outs: [data/documents]}}"
    project = make_project(dag, **{"slow.sh": script})
    other = project.start("dvc", "repro")
    end_group(other)
    until = time.monotonic() + 60
    while not (project.root / "started").exists():
        assert time.monotonic() < until and other.poll() is None
        time.sleep(0.1)
    flow = project.start(sys.executable, "-u", "-m", "flows.pipeline", PREFECT_API_URL=prefect_api)
    end_group(flow)
    assert flow.stdout is not None
    heard = ""
    while "waiting: DVC's lock is held by" not in heard:
        assert (line := flow.stdout.readline()), heard
        heard += line
    assert f"repro` (process {other.pid})" in heard
    (project.root / "go").touch()
    rest, _ = flow.communicate(timeout=60)
    assert statuses(rest) == {"corpus": "cached"}
    assert other.wait(30) == 0


def test_task_runs_in_prefect_carry_the_stages_names_and_ends(make_project: Callable, prefect_api: str):
    """On a real server: one flow run, a task run a stage, Completed or Cached or Failed with the stage's line."""
    project = make_project(CHAIN, **{"stage.py": STAGE})
    project.pipeline("--to", "tools", PREFECT_API_URL=prefect_api)
    project.edit("stage.py", "    name = stage.name\n", "    name = stage.name\n    if name == 'sft': raise SystemExit(3)\n")
    project.run("dvc", "commit", "-f", "tools")
    failed = project.pipeline(check=False, PREFECT_API_URL=prefect_api)
    assert failed.returncode == 3
    script = (
        "import json, httpx, sys; api = sys.argv[1]; post = lambda path, **body: httpx.post(api + path, json=body).json()\n"
        "run = post('/flow_runs/filter', sort='START_TIME_DESC', limit=1)[0]\n"
        "tasks = post('/task_runs/filter', flow_runs={'id': {'any_': [run['id']]}})\n"
        "print(json.dumps([run['state']['type'], run['state']['message'], {t['name']: t['state']['name'] for t in tasks}]))"
    )
    until = time.monotonic() + 20
    while True:  # the server records task runs from events, a moment later
        state, message, tasks = json.loads(
            subprocess.run([sys.executable, "-c", script, prefect_api], capture_output=True, text=True).stdout
        )
        if tasks == {"corpus": "Completed", "tools": "Cached", "sft": "Failed", "rl": "NotReady"}:
            break
        assert time.monotonic() < until, tasks
        time.sleep(0.5)
    assert state == "FAILED" and message.startswith("sft: ")
