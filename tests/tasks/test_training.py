"""pretrain and sft as dvc runs them, `python -m tasks.<stage>`: killed, resumed, given bad input, out of disk."""

import csv
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from k2 import storage
from k2.errors import K2Error

PRETRAIN = ("data/tokens", "data/tokenizer")
SFT = ("data/tokens", "data/trajectories", "models/extend")


def curve(root: Path, stage: str) -> list[dict[str, str]]:
    """plots/<stage>.csv without its timings."""
    with open(root / f"plots/{stage}.csv") as file:
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in csv.DictReader(file)]


def test_pretrain_killed_goes_on_and_only_from_its_own_state(checkout):
    """kill -9 in the middle, run again: the model's bytes and the curve are those of a run in one go. In between, another learning
    rate starts afresh, in a folder of its own, and leaves the state of the first alone."""
    project = checkout(*PRETRAIN)
    assert "resuming" not in project.run("pretrain").stdout
    expected, rows = project.model("pretrain"), curve(project.root, "pretrain")
    assert len(rows) == 24 and json.loads((project.root / "metrics/pretrain.json").read_text())["steps"] == 24
    assert not project.states("pretrain")  # a stage that succeeded leaves none
    project.remove("pretrain")

    project.kill("pretrain")
    left = project.states("pretrain")
    project.configure(**{"pretrain.optim.lr": 1e-3})
    assert "resuming" not in project.run("pretrain").stdout
    assert project.model("pretrain") != expected and project.states("pretrain") == left
    project.remove("pretrain")

    project.configure(**{"pretrain.optim.lr": 3e-3})
    assert "pretrain: resuming after step" in project.run("pretrain").stdout
    assert project.model("pretrain") == expected
    assert curve(project.root, "pretrain") == rows
    assert not project.states("pretrain")


def test_sft_killed_twice_goes_on(checkout):
    """The same for fine-tuning, killed a second time after it had resumed."""
    project = checkout(*SFT)
    project.run("sft")
    expected, rows = project.model("sft"), curve(project.root, "sft")
    project.remove("sft")
    project.kill("sft")
    project.kill("sft", step=int(project.states("sft")[-1].name[5:]) + 2)
    assert "sft: resuming after step" in project.run("sft").stdout
    assert project.model("sft") == expected and curve(project.root, "sft") == rows


@pytest.mark.parametrize(
    ("stage", "needs", "file"),
    [("sft", SFT, "models/extend/model.safetensors"), ("pretrain", PRETRAIN, "data/tokens/pretrain.bin")],
)
def test_damaged_input_is_one_line_and_no_output(checkout, stage, needs, file):
    """One flipped bit in a model or a token shard: the line names the file and the mend, and nothing is written."""
    project = checkout(*needs)
    path = project.root / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    done = project.run(stage, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{stage}: {file}: checksum differs") and "run `dvc checkout` or the stage that makes it" in line
    for folder in ("models", "metrics", "plots"):
        made = project.root / folder
        assert not made.exists() or [p.name for p in made.iterdir()] in ([], ["extend"])


FILES = '"$@"; code=$?; find {place} -type f; exit $code'


def small_disk(root: Path, place: str) -> list[str] | None:
    """The words that run a command with a tmpfs of 100 kB at `place`, in a mount namespace of its own, and list the files left
    there; None where that is not allowed."""
    (root / place).mkdir(parents=True, exist_ok=True)
    words = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=100k tmpfs {place} && {{ {FILES.format(place=place)}; }}", "sh"]
    try:
        return words if subprocess.run([*words, "true"], cwd=root, capture_output=True).returncode == 0 else None
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("place", ["models", ".k2"])
def test_a_full_disk_leaves_nothing_behind(checkout, place):
    """While the model is written, or a resume state: one line says so, and no file is left that could pass for whole. Where no
    small disk can be mounted, a limit on the size of files takes its place (another error, the same property)."""
    project = checkout(*PRETRAIN)
    project.configure(**{"pretrain.tokens": 256, "execution.checkpoint_seconds": 1e6 if place == "models" else 1e-3})
    words, command = small_disk(project.root, place), project.command("pretrain")
    limited = ["sh", "-c", f"ulimit -f 200; {FILES.format(place=place)}", "sh"]
    command["args"] = (words or limited) + command["args"]
    done = subprocess.run(**command, capture_output=True)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert not any((project.root / folder).exists() for folder in ("metrics", "plots", "models/pretrain"))
    if words:
        line = done.stderr.splitlines()[-1]
        assert line.startswith(f"pretrain: {place}/") and "the disk is full; free some space" in line
        assert "Traceback" not in done.stderr


def test_write_whole_on_a_full_device(tmp_path: Path):
    """A real ENOSPC (/dev/full) within a block: K2Error names the output, the old one stays, no partial one is left."""
    target = tmp_path / "out"
    with storage.write_whole(target) as partial:
        partial.mkdir()
        (partial / "a").write_text("old")
    with pytest.raises(K2Error, match=f"{target}: the disk is full"), storage.write_whole(target) as partial:
        partial.mkdir()
        (partial / "a").write_text("new")
        os.symlink("/dev/full", partial / "b")
        with open(partial / "b", "wb", buffering=0) as file:
            file.write(b"x")
    assert (storage.verify(target) / "a").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out"]
    other = OSError(errno.EIO, "input/output error")
    with pytest.raises(OSError, match="input/output"), storage.write_whole(target) as partial:
        raise other
    assert (storage.verify(target) / "a").read_text() == "old"
