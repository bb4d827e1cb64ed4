"""A stage sees what its entry in dvc.yaml declares, and nothing else; its outputs appear when all of it succeeded."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from k2.errors import ConfigError, K2Error
from tasks.stage import MADE, RESUME, Stage, paths, read_dag

ROOT = Path(__file__).parents[2]
DAG = """
stages:
  corpus: {cmd: x, params: [corpus], outs: [data/documents], metrics: [metrics/corpus.json], plots: [plots/corpus.csv]}
  tokenizer: {cmd: x, deps: [code.py, data/documents, metrics/corpus.json], params: [tokenizer], outs: [data/tokenizer]}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "dvc.yaml").write_text(DAG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_corpus(text: str = "text") -> None:
    with Stage("corpus") as stage:
        (stage.out("documents") / "train.jsonl").write_text(text)
        stage.metrics({"documents": 1})


def test_what_dvc_yaml_does_not_declare_is_refused():
    """Sections, inputs, outputs and stages: each refusal names the line of dvc.yaml to mend, and is a configuration error."""
    make_corpus()
    with Stage("tokenizer") as stage:
        assert stage.params.tokenizer.path is None
        assert (stage.dep("documents") / "train.jsonl").read_text() == "text" and stage.dep("corpus.json").exists()
        for access, message in (
            (lambda: stage.params.corpus, "stages.tokenizer.params does not list `corpus`"),
            (lambda: stage.dep("tokens"), "stages.tokenizer does not list `tokens` under deps"),
            (lambda: stage.dep("code.py"), "stages.tokenizer does not list `code.py` under deps"),
            (lambda: stage.out("model"), "stages.tokenizer does not list `model` under outs"),
            (lambda: stage.metrics({"x": 1}), "stages.tokenizer does not list `tokenizer.json` under outs, metrics or plots"),
        ):
            with pytest.raises(ConfigError, match=message):
                access()
    with pytest.raises(ConfigError, match="stages.tokenise is not there; known stages: corpus, tokenizer"):
        Stage("tokenise")


def test_outputs_appear_only_when_the_whole_stage_succeeded():
    """A stage that fails after writing leaves no output, and its error passes on."""
    with pytest.raises(RuntimeError), Stage("corpus") as stage:
        (stage.out("documents") / "train.jsonl").write_text("half")
        raise RuntimeError
    assert not Path("data/documents").exists() and os.listdir("data") == []
    make_corpus()
    assert sorted(os.listdir("data/documents")) == ["manifest.json", "train.jsonl"]


def test_missing_and_damaged_inputs_are_one_line():
    """The input is named, and how to get it."""
    with Stage("tokenizer") as stage, pytest.raises(K2Error, match="data/documents: missing; run `dvc repro tokenizer`"):
        stage.dep("documents")
    make_corpus()
    Path("data/documents/train.jsonl").write_text("tixt")
    with Stage("tokenizer") as stage, pytest.raises(K2Error, match="data/documents/train.jsonl: checksum differs"):
        stage.dep("documents")


def test_a_metric_that_is_no_number_is_refused():
    """NaN in a metrics file would break comparisons later; the stage that computed it fails instead."""
    with pytest.raises(K2Error, match="metrics/corpus.json: eval.loss is nan"), Stage("corpus") as stage:
        stage.metrics({"eval": {"loss": float("nan")}})


def test_the_fingerprint_is_what_is_computed_not_where():
    """It changes with the stage's params and inputs, not with other sections nor with `execution`; reverting restores it."""

    def fingerprint() -> str:
        return Stage("tokenizer").fingerprint

    def edit(old: str, new: str) -> None:
        text = Path("params.yaml").read_text()
        assert old in text
        Path("params.yaml").write_text(text.replace(old, new, 1))

    make_corpus()
    first = fingerprint()
    edit("checkpoint_seconds: ", "checkpoint_seconds: 1")
    edit("rl:\n  steps: ", "rl:\n  steps: 1")
    assert fingerprint() == first
    edit("  path: null", "  path: /somewhere")
    assert fingerprint() != first
    edit("  path: /somewhere", "  path: null")
    assert fingerprint() == first
    make_corpus("other")
    assert fingerprint() != first
    make_corpus()
    assert fingerprint() == first


def test_resume_states_go_when_the_stage_succeeds_and_stay_when_it_fails():
    """They lie outside the outputs, which DVC deletes before a stage runs again."""
    for fails in (True, False):
        try:
            with Stage("corpus") as stage:
                stage.resume_folder.mkdir(parents=True, exist_ok=True)
                assert stage.resume_folder.is_relative_to(RESUME)
                if fails:
                    raise K2Error("x")
        except K2Error:
            pass
        assert stage.resume_folder.exists() == fails


SCRIPT = """
import sys, time
from tasks.stage import run
def main(stage):
    {body}
run("corpus", main)
"""


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("raise __import__('k2.errors').errors.K2Error('it is broken; mend it')", 1, "corpus: it is broken; mend it\n"),
        ("stage.params.rl", 2, "corpus: dvc.yaml: stages.corpus.params does not list `rl`, which the task reads; add it\n"),
        ("import no_such_package", 1, "corpus: the package of `no_such_package` is not installed; run `make setup`\n"),
        ("open('/dev/full', 'w').write('x' * 10**6)", 1, "the disk is full; free some space and run again\n"),
        ("raise KeyboardInterrupt", 130, "corpus: interrupted\n"),
    ],
)
def test_errors_of_a_stage_process_are_one_line_and_an_exit_code(project: Path, body: str, code: int, error: str):
    """No traceback for what a user can mend."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.endswith(error) and done.stderr.count("\n") == 1
    assert not Path("data/documents").exists()


def test_sigterm_ends_a_stage_by_the_same_doors_as_an_error(project: Path):
    """Temporary outputs go, the exit code says terminated."""
    script = SCRIPT.format(body="stage.out('documents'); print('ready', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143 and time.monotonic() - started < 5
    process.stdout.close()
    assert os.listdir("data") == []


def test_the_recipe_declares_every_section_and_runs_every_stage_the_same_way():
    """Each stage is `python -m tasks.<stage>`, depends on its own code, and every section but `execution` is some stage's."""
    stages = read_dag(ROOT)
    sections: set[str] = set()
    for name, entry in stages.items():
        assert entry["cmd"] == f"python -m tasks.{name}"
        assert f"tasks/{name}.py" in paths(entry, "deps") and paths(entry, "metrics") == [f"metrics/{name}.json"]
        sections |= set(entry["params"])
    known = set(yaml.safe_load((ROOT / "params.yaml").read_text()))
    assert sections == known - {"execution"}
    made = [path for entry in stages.values() for kind in MADE for path in paths(entry, kind)]
    assert len(made) == len(set(made))
    assert set(stages) == {path.stem for path in (ROOT / "tasks").glob("*.py")} - {"__init__", "stage", "training"}
