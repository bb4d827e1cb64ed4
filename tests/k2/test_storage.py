"""Whole or not at all: what a later stage finds is complete and undamaged, whatever happened to the writer."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k2 import storage
from k2.errors import K2Error

WRITER = """
import sys
from pathlib import Path
from k2.storage import write_whole
print("ready", flush=True)
for number in range(1, 10**6):
    with write_whole(Path(sys.argv[1]) / "out") as partial:
        partial.mkdir()
        for name in "abcd":
            (partial / name).write_text(str(number) * 20000)
    with write_whole(Path(sys.argv[1]) / "file.txt") as partial:
        partial.write_text(str(number) * 20000)
"""


def write(path: Path, text: str = "hello") -> Path:
    with storage.write_whole(path) as partial:
        partial.mkdir()
        (partial / "sub").mkdir()
        (partial / "sub" / "x").write_text(text)
    return path


def test_a_folder_appears_whole_with_its_checksums_and_replaces_the_old_one(tmp_path: Path):
    """Size and SHA-256 of every file, nested ones too; nothing temporary is left beside it."""
    write(tmp_path / "out", "one")
    write(tmp_path / "out", "three")
    entry = json.loads((tmp_path / "out/manifest.json").read_text())["files"]["sub/x"]
    assert entry == {"bytes": 5, "sha256": "8b5b9db0c13db24256c829aa364aa90c6d2eba318b9232a4ab9313b954d3555f"}
    assert storage.verify(tmp_path / "out") == tmp_path / "out"
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_leaves_what_was_there(tmp_path: Path):
    """The old output stays whole, the new one leaves no trace."""
    write(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), storage.write_whole(tmp_path / "out") as partial:
        partial.mkdir()
        (partial / "x").write_text("half")
        raise RuntimeError
    assert (storage.verify(tmp_path / "out") / "sub/x").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_kill_9_at_random_points_never_leaves_a_half_that_passes_for_whole(tmp_path: Path):
    """After each kill the output is absent or verifies, all its files of one write; the next write tidies up."""
    seed = random.Random(0)
    for _ in range(20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(seed.uniform(0.0, 0.06))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if (tmp_path / "out").exists():
            contents = {(storage.verify(tmp_path / "out") / name).read_text() for name in "abcd"}
            assert len(contents) == 1
        if (tmp_path / "file.txt").exists():
            text = (tmp_path / "file.txt").read_text()
            assert text == text[: len(text) // 20000] * 20000 and text
    with storage.write_whole(tmp_path / "out") as partial:
        partial.mkdir()
    with storage.write_whole(tmp_path / "file.txt") as partial:
        partial.write_text("end")
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "out"]


def test_damage_is_found_and_named(tmp_path: Path):
    """A changed byte, a missing file, a missing or unreadable manifest: one line that names the file and the mend."""
    out = write(tmp_path / "out")
    (out / "sub/x").write_text("hellO")
    with pytest.raises(K2Error, match="out/sub/x: checksum differs, the file is damaged; .*dvc checkout"):
        storage.verify(out)
    (out / "sub/x").unlink()
    with pytest.raises(K2Error, match="out/sub/x: missing"):
        storage.verify(out)
    for nonsense in ("{", "[]", "{}"):
        (out / "manifest.json").write_text(nonsense)
        with pytest.raises(K2Error, match="manifest.json: not readable"):
            storage.verify(out)
    (out / "manifest.json").unlink()
    with pytest.raises(K2Error, match="out: not a finished output"):
        storage.verify(out)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path):
    """The kernel's own ENOSPC, from a device that is always full."""
    with (
        pytest.raises(K2Error, match="out: the disk is full; free some space and run again"),
        storage.write_whole(tmp_path / "out") as p,
    ):
        p.mkdir()
        (p / "weights").symlink_to("/dev/full")
        (p / "weights").write_text("x" * 10**6)
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_while_saving_weights(tmp_path: Path):
    """A file system of 1 MB and a library whose error for it is its own (safetensors)."""
    script = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from safetensors.numpy import save_file; from k2.storage import write_whole\n"
        "with write_whole(Path(sys.argv[1]) / 'model') as partial:\n"
        "    partial.mkdir()\n"
        "    save_file({'w': np.zeros(1 << 20)}, partial / 'model.safetensors')\n"
    )
    command = 'mount -t tmpfs -o size=1m tmpfs "$1" && "$2" -c "$3" "$1"; echo exit $?; ls -A "$1"'
    mounting = ["unshare", "--mount", "--map-root-user", "sh", "-c", command, "sh", str(tmp_path), sys.executable, script]
    done = subprocess.run(mounting, capture_output=True, text=True)
    if "exit" not in done.stdout or "mount" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert "K2Error" in done.stderr and "model: the disk is full; free some space and run again" in done.stderr
    assert done.stdout.split("\n")[:2] == ["exit 1", ""]
