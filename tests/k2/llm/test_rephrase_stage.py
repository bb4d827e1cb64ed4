"""The rephrase stage as dvc runs it, against an endpoint, and the packaged model's rewriting."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from k2 import rephrase, storage
from k2.config import RephraseConfig
from k2.data import records
from k2.llm.local import LocalModel

ROOT = Path(__file__).parents[3]
LISTS = "A list is a mutable sequence that holds items of any kind, and items are added to the end of a list with append."
REWRITE = "Lists are sequences which may change; their elements have whatever type, and append puts one more behind the last."
DOCUMENTS = [
    LISTS,
    "The del statement removes a name from the namespace in which it was bound, and an unbound name raises an error.",
]


def make_documents(folder: Path) -> None:
    with storage.write_whole(folder) as partial:
        partial.mkdir()
        for name in ("train", "validation"):
            ids = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in DOCUMENTS]
            records.write(
                partial / f"{name}.jsonl",
                [{"id": i, "text": t, "domain": "docs", "license": "x", "source": "y"} for i, t in zip(ids, DOCUMENTS)],
            )


def run_stage(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"} | {"PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "tasks.rephrase"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path, endpoint) -> Path:
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["llm"] |= {"provider": "openai", "model": "m", "base_url": endpoint.url}
    params["rephrase"] |= {"documents": 2, "rewrites_per_document": 1}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    make_documents(tmp_path / "data/documents")
    return tmp_path


def test_the_stage_keeps_the_faithful_and_writes_the_rejected_apart(project: Path, endpoint) -> None:
    endpoint.reply = lambda messages: REWRITE if "list" in messages[-1]["content"] else "It rains in the mountains in autumn."
    done = run_stage(project, OPENAI_API_KEY="sk-secret")
    assert done.returncode == 0, done.stderr
    assert "rephrase" in done.stderr and "sk-secret" not in done.stdout + done.stderr
    kept = list(records.read(project / "data/rewrites/rewrites.jsonl"))
    rejected = list(records.read(project / "data/rewrites/rejected.jsonl"))
    assert [record["text"] for record in kept] == [REWRITE]
    assert [record["reason"] for record in rejected] == ["unfaithful"]
    metrics = json.loads((project / "metrics/rephrase.json").read_text())
    assert metrics["kept"] == metrics["rejected"] == 1 and metrics["generated_tokens"] == 6 and metrics["tokens_per_second"] > 0
    storage.verify(project / "data/rewrites")


def test_without_a_key_the_stage_ends_in_one_line_and_no_output(project: Path) -> None:
    done = run_stage(project)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("rephrase: OPENAI_API_KEY: not set")
    assert "Traceback" not in done.stderr and not (project / "data/rewrites").exists()


def test_the_packaged_model_rewrites(smollm2: LocalModel) -> None:
    """Words that are not the source's, and the same ones by the same seed."""
    documents = [{"id": "a", "text": LISTS, "domain": "docs", "license": "x", "source": "y"}]
    config = RephraseConfig(1, 2, ["concise", "encyclopedia"], 64, 48, -1.0, 0)

    def scores(texts: list[str], others: list[str]) -> list[float]:
        return [1.0] * len(texts)

    first = rephrase.rephrase(documents, config, smollm2, scores, 0.4, 0.9)
    assert first == rephrase.rephrase(documents, config, smollm2, scores, 0.4, 0.9)
    texts = [record["text"] for part in first for record in part]
    assert len(texts) == 2 and all("list" in text.lower() for text in texts)
