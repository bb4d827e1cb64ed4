"""rl as dvc runs it, `python -m tasks.rl`: killed and resumed, with nothing to learn, with nothing left to learn."""

import csv
import json
from pathlib import Path

from tasks.rl import summary

NEEDS = ("models/sft", "data/rl_prompts", "data/trajectories")


def curve(root: Path) -> list[dict[str, str]]:
    with open(root / "plots/rl.csv") as file:
        return [{k: v for k, v in row.items() if not k.endswith("_seconds") and k[:5] != "perf/"} for row in csv.DictReader(file)]


def test_rl_killed_goes_on_bit_for_bit(checkout):
    """kill -9 in the middle, run again: model, curve and metrics are those of a run in one go, held-out rewards included."""
    project = checkout(*NEEDS)
    project.run("rl")
    expected, rows = project.model("rl"), curve(project.root)
    metrics = json.loads((project.root / "metrics/rl.json").read_text())
    assert [row["step"] for row in rows] == [str(i) for i in range(7)]
    assert [bool(row["rl/held_out"]) for row in rows] == [i in (0, 3, 6) for i in range(7)]
    assert metrics["held_out_rise"] == metrics["held_out_after"] - metrics["held_out_before"] and metrics["logprob_gap"] < 1e-3
    project.remove("rl")
    project.kill("rl")
    assert "rl: resuming after step" in project.run("rl").stdout
    assert project.model("rl") == expected and curve(project.root) == rows
    again = json.loads((project.root / "metrics/rl.json").read_text())
    assert {k: v for k, v in again.items() if k != "sync_seconds"} == {k: v for k, v in metrics.items() if k != "sync_seconds"}


def test_nothing_to_learn_is_one_line(checkout):
    """A budget of no use (one token never ends an answer) earns the same for all: one line with advice, no model."""
    project = checkout(*NEEDS)
    project.configure(**{"gym.max_new_tokens": {"gcd": 1}, "rl.temperature": 0.01, "rl.final_temperature": 0.01})
    done = project.run("rl", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert (
        last.startswith("rl: rl step 1: in each of 4 groups all 6 answers earn the same")
        and "widen curate's pass-rate band" in last
    )
    assert [p.name for p in (project.root / "models").iterdir()] == ["sft"]


def test_summary_of_a_training_with_nothing_left_to_learn():
    """Every answer right from the start: the rise is 0 and no statistic of a step is asked for."""
    found = summary([{"step": 0.0, "rl/held_out": 100.0, "rl/held_out_gcd": 100.0}])
    assert found["held_out_rise"] == 0.0 and found["held_out_after"] == 100.0 and found["dead_groups"] == 0
