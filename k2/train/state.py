"""Resume states of a training stage: whole or absent, in a folder of exactly this computation (see tasks/stage.py)."""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from k2 import storage
from k2.errors import K2Error

KEEP = 2  # a state that turns out damaged has a predecessor


def save_state(folder: Path, step: int, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
    """Write step-<n>/ by one rename with its checksums inside, then drop all but the newest two."""
    with storage.write_whole(folder / f"step-{step:08d}") as partial:
        partial.mkdir()
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / "state.safetensors")
        (partial / "extra.json").write_text(json.dumps({"step": step, **extra}))
    for old in sorted(folder.glob("step-*"))[:-KEEP]:
        storage.remove(old)


def load_state(folder: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole state: (step, tensors, extra), or None. A damaged one is deleted with a word on stderr: left there, it would
    count among the newest and displace the states that are saved after it."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            storage.verify(path)
        except K2Error as error:
            print(f"passing over a damaged resume state: {error}", file=sys.stderr)
            storage.remove(path)
            continue
        extra = json.loads((path / "extra.json").read_text())
        return extra.pop("step"), load_file(path / "state.safetensors"), extra
    return None
