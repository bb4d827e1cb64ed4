import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k2.train.state import KEEP, load_state, save_state

# A saver that forks one child for each kill: the child saves step after step and says which saves have returned.
SAVER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from k2.train.state import load_state, save_state
torch.set_num_threads(1)
folder, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
begun = time.monotonic()
for step in range(1, 4):
    save_state(folder, step, {"w": torch.full((1 << 18,), float(step))}, {"tokens": 7 * step})
a_save = (time.monotonic() - begun) / 3
for _ in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(step + 1, step + 1000):
            save_state(folder, step, {"w": torch.full((1 << 18,), float(step))}, {"tokens": 7 * step})
            os.write(write, step.to_bytes(4, "big"))
    os.close(write)
    time.sleep(rng.uniform(0, 3 * a_save))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    returned = step
    while word := os.read(read, 4):
        returned = int.from_bytes(word, "big")
    os.close(read)
    partial = len(list(folder.glob(".step-*.partial")))
    found = load_state(folder)
    whole = found is not None and bool((found[1]["w"] == found[0]).all()) and found[2] == {"tokens": 7 * found[0]}
    print(json.dumps({"returned": returned, "found": found and found[0], "whole": whole, "partial": partial}))
    step = found[0] if found else step
"""


def test_killed_while_saving_a_whole_state_is_found(tmp_path: Path):
    """Trap 15: kill -9 at twenty random points of a save; what is found is whole and no older than the last save that returned."""
    done = subprocess.run([sys.executable, "-c", SAVER, tmp_path / "states", "20"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == 20
    for kill in kills:
        assert kill["whole"] and kill["found"] in (kill["returned"], kill["returned"] + 1), kill
    assert sum(kill["partial"] for kill in kills) >= 5  # the kills did fall into saves


def tensors(step):
    return {"a": torch.full((100,), float(step)), "b": torch.arange(5) * step}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path):
    """Tensors of any dtype bit for bit, the step and the rest; before the first save there is nothing."""
    assert load_state(tmp_path / "none") is None
    given = {"x": torch.randn(3, 4).bfloat16(), "step": torch.tensor(5.0), "view": torch.arange(6).view(2, 3).T}
    save_state(tmp_path, 5, given, {"tokens": 12, "history": [{"step": 5.0}]})
    found = load_state(tmp_path)
    assert found is not None and found[0] == 5 and found[2] == {"tokens": 12, "history": [{"step": 5.0}]}
    assert found[1].keys() == given.keys()
    assert all(torch.equal(found[1][n], t) and found[1][n].dtype == t.dtype for n, t in given.items())


def test_the_newest_states_are_kept(tmp_path: Path):
    """Two of them, also across a change in the number of digits."""
    for step in (8, 9, 10, 11):
        save_state(tmp_path, step, tensors(step), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000011"] and KEEP == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "no tensors", "no manifest", "manifest"])
def test_a_damaged_newest_state_is_passed_over(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture):
    """The one before it is taken, with a word on stderr that names the file."""
    for step in (1, 2):
        save_state(tmp_path, step, tensors(step), {"tokens": step})
    newest = tmp_path / "step-00000002"
    file = newest / ("state.safetensors" if "manifest" not in damage else "manifest.json")
    raw = file.read_bytes()
    if damage == "flip":
        place = random.Random(0).randrange(len(raw))
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    elif damage.startswith("no"):
        file.unlink()
    else:
        file.write_bytes(raw[: len(raw) // 2])
    found = load_state(tmp_path)
    assert found is not None and found[0] == 1 and torch.equal(found[1]["a"], tensors(1)["a"])
    assert "step-00000002" in capsys.readouterr().err


def test_a_state_that_was_passed_over_never_displaces_a_good_one(tmp_path: Path):
    """Two later states are damaged: a save after that still is there to be found."""
    for step in (3, 4):
        save_state(tmp_path, step, tensors(step), {})
        (tmp_path / f"step-{step:08d}/manifest.json").unlink()
    assert load_state(tmp_path) is None
    save_state(tmp_path, 1, tensors(1), {})
    found = load_state(tmp_path)
    assert found is not None and found[0] == 1
