"""corpus, tokenizer and tokenize as dvc runs them: `python -m tasks.<stage>` on the real dvc.yaml, on a user's text."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from k2 import storage, track
from k2.data import records
from k2.data.shards import TokenRows
from k2.tokenizer import ChatTokenizer

ROOT = Path(__file__).parents[2]
SMALL = {"tokens": 8192, "batch_tokens": 1024, "micro_batch_tokens": 1024}


def run(folder: Path, stage: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), track.SWITCH: "off"}
    return subprocess.run([sys.executable, "-m", f"tasks.{stage}"], cwd=folder, env=env, capture_output=True, text=True)


def configure(folder: Path, changes: dict[str, dict]) -> None:
    params = yaml.safe_load((folder / "params.yaml").read_text())
    for section, values in changes.items():
        params[section].update(values)
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a user's corpus: the three stages done, no rewrites."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    rng = random.Random(0)
    words = "the a model token expert router matrix gradient step loss of and to in reads writes finds 12 7 (x)".split()
    (folder / "mine").mkdir()
    for i in range(60):
        (folder / f"mine/{i}.txt").write_text(" ".join(rng.choices(words, k=300)) + ".\n")
    configure(
        folder,
        {
            "corpus": {"source": "mine"},
            "model": {"vocab_size": 400},
            "pretrain": SMALL | {"seq_len": 128},
            "anneal": SMALL | {"seq_len": 128},
            "extend": SMALL | {"seq_len": 256},
        },
    )
    (folder / "data/rewrites").mkdir(parents=True)
    records.write(folder / "data/rewrites/rewrites.jsonl", [])
    storage.seal(folder / "data/rewrites")
    for stage in ("corpus", "tokenizer", "tokenize"):
        done = run(folder, stage)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_users_own_text_reaches_every_phase(workspace: Path):
    """A folder of txt, with the mixture of params.yaml unchanged, fills all phases and the validation split."""
    tokenizer = ChatTokenizer.load(workspace / "data/tokenizer")
    assert tokenizer.vocab_size == 400
    for phase, seq_len in (("pretrain", 128), ("anneal", 128), ("extend", 256)):
        rows = TokenRows(workspace / "data/tokens", phase)
        assert (rows.rows, rows.row_tokens) == (8192 // seq_len, seq_len + 1)
        assert "router" in tokenizer.decode(rows.read(np.arange(rows.rows)).flatten().tolist())
    metrics = json.loads((workspace / "metrics/tokenize.json").read_text())
    assert set(metrics["extend"]["domains"]) == {"text", "recall"}
    held_out = {record["text"] for record in records.read(workspace / "data/documents/validation.jsonl")}
    rows = TokenRows(workspace / "data/tokens", "validation")
    indices = np.arange(rows.rows)
    text = tokenizer.decode(rows.read(indices)[:, 1:].flatten().tolist())
    assert rows.bytes(indices).sum() == len(text.replace("[BOS]", "").replace("[EOS]", "").encode())
    assert any(text.split("[EOS]")[0].removeprefix("[BOS]") in whole for whole in held_out)


def test_the_stages_are_deterministic(workspace: Path):
    """Run again, they write the same bytes: so does dvc find the stages after them up to date."""
    before = {name: storage.sha256(workspace / f"data/{name}/manifest.json") for name in ("documents", "tokenizer", "tokens")}
    for stage in ("corpus", "tokenizer", "tokenize"):
        assert run(workspace, stage).returncode == 0
    assert before == {name: storage.sha256(workspace / f"data/{name}/manifest.json") for name in before}


@pytest.mark.parametrize(
    "stage, file",
    [
        ("tokenize", "data/documents/train.jsonl"),
        ("tokenize", "data/tokenizer/tokenizer.json"),
        ("pretrain", "data/tokens/pretrain.bin"),
    ],
)
def test_a_flipped_byte_is_caught_by_the_next_stage(workspace: Path, monkeypatch: pytest.MonkeyPatch, stage: str, file: str):
    """The stage that reads a damaged file ends with one line that names it."""
    from k2.errors import K2Error
    from tasks.stage import Stage

    stage, path = "pretrain" if "tokens" in file else "tokenize", workspace / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    try:
        original = path.read_bytes()
        path.write_bytes(data)
        monkeypatch.chdir(workspace)
        with pytest.raises(K2Error, match=rf"{file}: checksum differs"):
            Stage(stage).dep(Path(file).parent.name)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    "changes, code, message",
    [
        ({"corpus": {"source": "python-dosc"}}, 2, "corpus: params.yaml: corpus.source: `python-dosc` is neither"),
        ({"corpus": {"source": "https://host.invalid/x.txt"}}, 1, "corpus: https://host.invalid/x.txt: cannot be reached"),
        ({"corpus": {"source": "binary"}}, 1, "binary/x.txt: not text"),
    ],
)
def test_a_bad_corpus_ends_in_one_line_and_leaves_nothing(workspace: Path, tmp_path: Path, changes: dict, code: int, message: str):
    """Exit code, one line without a traceback, and no data/documents that a later stage could take."""
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(workspace / name, tmp_path / name)
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary/x.txt").write_bytes(b"\x89PNG\x00")
    configure(tmp_path, changes)
    done = run(tmp_path, "corpus")
    assert done.returncode == code and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "data").exists() or not any((tmp_path / "data").iterdir())
