"""A run with overrides: beside the checkout, sharing what is computed, kept as an experiment."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.worktree import open_worktree, resolve_params, run_name, save_experiment
from k2.errors import K2Error

DAG = """
stages:
  corpus: {cmd: cat extra.txt code.txt > documents; echo ran >> "$RAN", deps: [code.txt], params: [corpus], outs: [documents]}
  sft:
    cmd: mkdir -p metrics && echo "{\\"loss\\":$(grep -A3 ^sft params.yaml | grep -c 'tokens. 7')}" > metrics/sft.json
    deps: [documents]
    params: [sft]
    metrics: [metrics/sft.json]
"""


def ran(project) -> int:
    return len((project.root.parent / "ran").read_text().split())


@pytest.fixture
def project(make_project: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    project = make_project(DAG, **{"code.txt": "old", "extra.txt": "x", "run.sh": "true"})
    project.run("dvc", "repro")
    project.commit("done")
    return project


def test_a_run_beside_the_checkout_shares_the_cache_and_ends_as_an_experiment(project):
    """Nothing before the changed section runs, the checkout stays as it was; `dvc exp show` lists it, `dvc exp apply` takes it."""
    project.edit("code.txt", "old", "uncommitted")
    project.write(**{"new.txt": "untracked"})
    project.run("dvc", "repro", "corpus")
    before, count = project.run("git", "status", "--porcelain").stdout, ran(project)
    text = resolve_params(project.root, None, {"sft.tokens": 7})
    with open_worktree(project.root, "seven", text) as path:
        assert path == project.root / ".k2/worktrees/seven"
        assert (path / "code.txt").read_text() == "uncommitted" and (path / "new.txt").read_text() == "untracked"
        assert (path / "documents").read_text() == "xuncommitted"  # from the shared cache
        assert (path / ".k2/resume").resolve() == project.root / ".k2/resume"
        with pytest.raises(K2Error, match="a run named `seven` is in progress"), open_worktree(project.root, "seven", text):
            pass
        shutil.copy(project.root / "dvc.lock", path)
        project.run("dvc", "--cd", str(path), "repro")
        save_experiment(path, "seven")
    assert not path.exists() and project.run("git", "worktree", "list").stdout.count("\n") == 1
    assert ran(project) == count and project.run("git", "status", "--porcelain").stdout == before
    shown = json.loads(project.run("dvc", "exp", "show", "--json").stdout)
    (experiment,) = [e for branch in shown for e in branch["experiments"] or []]
    data = experiment["revs"][0]["data"]
    assert experiment["name"] == "seven"
    assert data["params"]["params.yaml"]["data"]["sft"]["tokens"] == 7 and data["metrics"]["metrics/sft.json"]["data"] == {
        "loss": 1
    }
    project.run("dvc", "exp", "apply", "seven")
    assert "tokens: 7" in (project.root / "params.yaml").read_text() and "up to date" in project.run("dvc", "status").stdout


def test_the_worktree_goes_whichever_way_the_run_ends(project):
    """An error, and a leftover of a run that was killed outright, which the next run of that name clears away."""
    text = resolve_params(project.root, "micro", {})
    with pytest.raises(RuntimeError), open_worktree(project.root, "micro", text) as path:
        raise RuntimeError
    assert not path.exists()
    project.run("git", "worktree", "add", "-q", "--detach", str(path), "HEAD")
    (path / ".k2").mkdir()
    (path / ".k2/process").write_text("999999999")
    with open_worktree(project.root, "micro", text):
        assert "vocab_size: 1024" in (path / "params.yaml").read_text()
    assert not path.exists()


def test_names_are_readable_and_valid():
    """A name is made of what differs; one given by hand is checked."""
    assert run_name("micro", {"sft.optim.lr": 0.001, "gym.x": [1, 2]}) == "micro-sft.optim.lr-0.001-gym.x-1-2"
    assert run_name(None, {}) == ""
    with pytest.raises(K2Error, match="use letters, digits"), open_worktree(Path(), "../up", ""):
        pass


def test_a_folder_outside_git_says_what_it_needs(tmp_path: Path):
    with pytest.raises(K2Error, match="overrides need a git clone"), open_worktree(tmp_path, "x", ""):
        pass
