"""The whole recipe, corpus to publish, on the micro preset, through both front doors."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from k2 import presets

ROOT = Path(__file__).parents[1]
STAGES = [
    "corpus",
    "rephrase",
    "tokenizer",
    "tokenize",
    "pretrain",
    "anneal",
    "extend",
    "tools",
    "trajectories",
    "sft",
    "curate",
    "rl",
]
STAGES += ["evaluate", "publish"]


@pytest.fixture
def clone(tmp_path: Path, copy_tree: Callable):
    """This working tree as a fresh clone with micro's params; what unpacking the language model takes is spent once."""
    project = copy_tree(tmp_path / "clone")
    project.write(**{"params.yaml": presets.overlay((ROOT / "params.yaml").read_text(), "micro")})
    (ROOT / ".k2/llm").mkdir(parents=True, exist_ok=True)
    (project.root / ".k2").mkdir()
    (project.root / ".k2/llm").symlink_to(ROOT / ".k2/llm")
    project.commit("micro")
    return project


def statuses(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+) +[\d.-]+ +(run|cached|failed|skipped)\b", text, re.MULTILINE))


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.timeout(2400)
def test_the_whole_recipe_through_both_front_doors(clone):
    """`dvc repro` runs every stage; the flow then finds everything cached, quickly; a changed sft knob runs sft and what follows,
    beside the checkout; DVC's own commands work on the result; a typo stops with exit 2."""
    clone.run("dvc", "repro")
    lock = (clone.root / "dvc.lock").read_text()
    assert all(f"\n  {stage}:\n" in lock for stage in STAGES)
    metrics = {stage: json.loads((clone.root / f"metrics/{stage}.json").read_text()) for stage in STAGES}
    assert metrics["publish"]["max_logit_difference"] < 1e-4
    clone.commit("lock")

    before = cpu_seconds()
    cached = clone.pipeline(K2_TRACKING="on")
    assert statuses(cached.stdout) == dict.fromkeys(STAGES, "cached") and "everything is up to date" in cached.stdout
    assert cpu_seconds() - before < 15 and (clone.root / "report/index.html").exists()

    changed = clone.pipeline("--set", "sft.optim.lr=4e-3", "--name", "slower", K2_TRACKING="on")
    expected = {stage: "run" if stage in ("sft", "curate", "rl", "evaluate", "publish") else "cached" for stage in STAGES}
    assert statuses(changed.stdout) == expected
    assert clone.run("git", "status", "--porcelain").stdout == "" and "up to date" in clone.run("dvc", "status").stdout
    shown = json.loads(clone.run("dvc", "exp", "show", "--json").stdout)
    assert "slower" in json.dumps(shown)

    tracked = clone.run("python", "-c", TRACKED).stdout
    children = json.loads(tracked)
    assert set(children) == {"sft", "curate", "rl", "evaluate", "publish"}
    assert children["sft"]["params"]["sft.optim.lr"] == "0.004" and "dvc.models/extend" in children["sft"]["tags"]
    assert {"train/loss", "optim/lr", "optim/grad_norm", "attn/max_logit", "perf/tokens_per_second"} <= set(
        children["sft"]["metrics"]
    )
    assert all(child["status"] == "FINISHED" for child in children.values())

    assert "pretrain" in clone.run("dvc", "dag").stdout
    assert set(json.loads(clone.run("dvc", "metrics", "show", "--json").stdout)[""]["data"]) == {
        f"metrics/{s}.json" for s in STAGES
    }
    clone.run("dvc", "plots", "show")
    clone.run("dvc", "exp", "run", "-S", "publish.alias=next", "--name", "next")
    assert "alias" in clone.run("dvc", "params", "diff").stdout

    clone.edit("params.yaml", "sft:\n  tokens:", "sft:\n  tokenz:")
    typo = clone.pipeline(check=False)
    assert typo.returncode == 2 and "params.yaml: sft.tokenz: unknown key; did you mean `tokens`?" in typo.stderr


TRACKED = """
import json, mlflow
client = mlflow.MlflowClient("sqlite:///mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("k2flow").experiment_id])
parent = next(r for r in runs if r.info.run_name == "slower")
children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
print(json.dumps({r.info.run_name: {"params": r.data.params, "tags": r.data.tags, "metrics": r.data.metrics, "status": r.info.status} for r in children}))
version = client.get_model_version_by_alias("k2-micro", "candidate")
assert version.run_id in {r.info.run_id for r in children}
"""  # noqa: E501
