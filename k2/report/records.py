"""What the stages have written, read leniently: a file that is not there yet is None or empty, never an error."""

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from k2.data import records

TRAINING = ["pretrain", "anneal", "extend", "sft"]  # share tokens and loss as their axes
MODELS = [*TRAINING, "rl"]

Curve = dict[str, np.ndarray]  # column name to values, NaN where a row has none


class Records:
    """The files of one run below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._curves: dict[str, Curve] = {}
        self.params: dict[str, Any] = self._yaml("params.yaml")
        self.stages: dict[str, dict[str, Any]] = self._yaml("dvc.yaml").get("stages", {})

    def metrics(self, stage: str) -> dict[str, Any]:
        """metrics/<stage>.json, {} before the stage ran."""
        try:
            return json.loads((self.root / "metrics" / f"{stage}.json").read_text())
        except (OSError, ValueError):
            return {}

    def curve(self, name: str) -> Curve:
        """plots/<name>.csv by column, {} before it is there. Text columns are kept as text."""
        if name not in self._curves:
            self._curves[name] = self._read_curve(name)
        return self._curves[name]

    def _read_curve(self, name: str) -> Curve:
        try:
            with open(self.root / "plots" / f"{name}.csv", newline="") as file:
                rows = list(csv.DictReader(file))
        except OSError:
            return {}
        return {column: _column([row[column] for row in rows]) for column in (rows[0] if rows else [])}

    def evaluation(self, name: str) -> list[dict[str, Any]]:
        """A JSONL file of data/evaluation, [] before the stage ran."""
        try:
            return list(records.read(self.root / "data" / "evaluation" / name))
        except (OSError, ValueError):
            return []

    def done(self, stage: str) -> bool:
        """Whether a stage has left its metrics."""
        return (self.root / "metrics" / f"{stage}.json").exists()

    def commit(self) -> str:
        """The commit of the checkout, with a mark if files differ from it; "" outside of git."""
        git = ["git", "-C", str(self.root)]
        try:
            commit = subprocess.run(
                [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip()
            dirty = subprocess.run(
                [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""
        return commit + (" with local changes" if dirty else "")

    def _yaml(self, name: str) -> dict[str, Any]:
        try:
            return yaml.load((self.root / name).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
        except (OSError, yaml.YAMLError):
            return {}


def _column(cells: list[str | None]) -> np.ndarray:
    try:
        return np.array([float(cell) if cell else np.nan for cell in cells])
    except ValueError:
        return np.array(cells)


def present(curve: Curve, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The points of column y over column x where both have a value; empty arrays if a column is missing."""
    if x not in curve or y not in curve:
        return np.array([]), np.array([])
    keep = np.isfinite(curve[x]) & np.isfinite(curve[y])
    return curve[x][keep], curve[y][keep]


def layers(curve: Curve, prefix: str) -> list[tuple[int, str]]:
    """The columns `<prefix><i>` as (i, column), by i."""
    return sorted(
        (int(column[len(prefix) :]), column) for column in curve if column.startswith(prefix) and column[len(prefix) :].isdigit()
    )
