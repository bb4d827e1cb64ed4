"""Checkouts in which a training stage can run: the real dvc.yaml, the micro preset made smaller still, inputs made by hand."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k2 import presets, storage
from k2.config import parse_params
from k2.data.shards import write_rows
from k2.gym import make_all
from k2.model import hf
from k2.model.transformer import Transformer
from k2.tokenizer import ChatTokenizer, bpe
from k2.train.batches import DialogueBatches
from k2.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
VOCAB, T = 320, 32
SMALL: dict[str, Any] = {
    "model.vocab_size": VOCAB,
    "gym.domains": {"gcd": {"dataset": "gcd", "min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9}},
    "gym.max_new_tokens": {"gcd": 4},
    "execution.device": "cpu",
    "execution.threads": 1,
    "execution.checkpoint_seconds": 1e-3,  # after every step
    "rl.steps": 6, "rl.prompts_per_step": 4, "rl.samples_per_prompt": 6, "rl.held_out_prompts": 4, "rl.held_out_every": 3,
    "rl.ptx_batch_tokens": 64, "rl.dtype": "float32", "rl.optim.lr": 5e-5, "rl.optim.final_lr": 5e-5,
}  # fmt: skip
for section in ("pretrain", "sft"):
    SMALL |= {
        f"{section}.tokens": 24 * 4 * T, f"{section}.seq_len": T, f"{section}.batch_tokens": 4 * T, f"{section}.dtype": "float32",
        f"{section}.micro_batch_tokens": 2 * T, f"{section}.validation_every": 8 * 4 * T, f"{section}.validation_tokens": 4 * T,
        f"{section}.optim.warmup_tokens": 4 * T, f"{section}.optim.lr": 3e-3,
    }  # fmt: skip


class Checkout:
    """A folder to run stages in, as processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def configure(self, **values: Any) -> None:
        """`configure(**{"pretrain.optim.lr": 1e-3})`."""
        path = self.root / "params.yaml"
        path.write_text(presets.override(path.read_text(), values))

    def command(self, stage: str) -> dict[str, Any]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return {"args": [sys.executable, "-m", f"tasks.{stage}"], "cwd": self.root, "env": env, "text": True}

    def run(self, stage: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(**self.command(stage), capture_output=True)
        assert not check or done.returncode == 0, done.stderr[-3000:]
        return done

    def kill(self, stage: str, step: int = 2) -> None:
        """Start the stage and kill -9 it as soon as the state of `step` or a later one is there."""
        with subprocess.Popen(**self.command(stage), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            until = time.monotonic() + 120
            while not any(int(path.name[5:]) >= step for path in self.states(stage)):
                assert process.poll() is None and time.monotonic() < until, process.communicate(timeout=5)
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL and not (self.root / f"models/{stage}").exists()

    def states(self, stage: str) -> list[Path]:
        return sorted(self.root.glob(f".k2/resume/{stage}/*/step-*"))

    def model(self, stage: str) -> bytes:
        return (storage.verify(self.root / f"models/{stage}") / "model.safetensors").read_bytes()

    def remove(self, stage: str) -> None:
        """What DVC does to a stage's outs before it runs it again."""
        for path in (f"models/{stage}", f"metrics/{stage}.json", f"plots/{stage}.csv"):
            storage.remove(self.root / path)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with tokenizer, tokens, trajectories, RL prompts, a random model of extend, one of sft that half knows gcd."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copy(ROOT / "dvc.yaml", folder)
    text = presets.override(presets.overlay((ROOT / "params.yaml").read_text(), "micro"), SMALL)
    (folder / "params.yaml").write_text(text)
    params = parse_params(text, "params.yaml")
    for name in ("tokenizer", "tokens", "trajectories", "rl_prompts"):
        (folder / "data" / name).mkdir(parents=True)
    bpe.save(bpe.train(["GCD: 1 2 3 4 5 6 7 8 9 and what else can I do for you?"] * 3, VOCAB), folder / "data/tokenizer")
    rng = np.random.default_rng(0)
    for phase, count in (("pretrain", 40), ("validation", 6)):
        rows = (rng.integers(0, 60, (count, 1)) + np.arange(T + 1) * rng.integers(1, 4, (count, 1))) % VOCAB
        write_rows(folder / "data/tokens", phase, rows.astype("<u2"), np.full(count, 3 * T) if phase == "validation" else None)
    gcd = make_all(params.gym)["gcd"]
    tasks = [gcd.task(i) for i in range(40)]
    (folder / "data/rl_prompts/prompts.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    records = [{"messages": gcd.solution(task), "tools": None} for task in tasks]
    (folder / "data/trajectories/train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    chat = ChatTokenizer.load(folder / "data/tokenizer")
    model = Transformer(params.model).initialize(1)
    hf.save(model, params.model, folder / "models/extend", folder / "data/tokenizer")
    trainer = Trainer(model, params.muonclip, "float32", 0.0)
    batches = DialogueBatches([chat.encode_chat(r["messages"]) for r in records], T, 16 * T, 16 * T, seed=0)
    for step in range(40):
        trainer.language_model_step(batches.step(step), 3e-3)
    hf.save(model, params.model, folder / "models/sft", folder / "data/tokenizer")
    for path in (*(folder / "data").iterdir(), *(folder / "models").iterdir()):
        storage.seal(path)
    return folder


@pytest.fixture
def checkout(inputs: Path, tmp_path: Path) -> Callable[..., Checkout]:
    """`checkout("data/tokens", ...)`: a new one with params.yaml, dvc.yaml and these inputs."""

    def make(*names: str) -> Checkout:
        root = tmp_path / "checkout"
        for name in ("params.yaml", "dvc.yaml", *names):
            source, target = inputs / name, root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return Checkout(root)

    return make
