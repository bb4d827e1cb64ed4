"""How much RL raises the held-out mean reward over the SFT model, for several seeds: `python -m benchmarks.rl_rise [SEED ...]`.

Run after `make run`: it takes models/sft, data/rl_prompts and data/trajectories as they are and trains once a seed (default: the
configured one and the next two). Rewards are of held-out tasks of every domain, in percent, sampled at temperature 1.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import dataclasses
import sys
import tempfile
import types
from pathlib import Path

from k2.config import load_params
from k2.data import records
from k2.train.loop import Run
from tasks.rl import build, summary

TARGET = 10.0  # points of 100


def main(seeds: list[int]) -> None:
    params = load_params("params.yaml")
    prompts = list(records.read(Path("data/rl_prompts/prompts.jsonl")))
    rises = []
    print(f"{'seed':>4} {'before':>7} {'after':>7} {'rise':>6}")
    for seed in seeds or range(params.rl.seed, params.rl.seed + 3):
        rl = dataclasses.replace(params.rl, seed=seed)
        sections = types.SimpleNamespace(muonclip=params.muonclip, gym=params.gym, rl=rl)
        loop, ptx = build(Path("models/sft"), Path("data/trajectories"), sections, "cpu")
        with tempfile.TemporaryDirectory() as scratch:
            found = summary(loop.train(prompts, ptx, Run("rl", Path(scratch), params.execution.checkpoint_seconds)))
        rises.append(found["held_out_rise"])
        print(f"{seed:>4} {found['held_out_before']:>7.1f} {found['held_out_after']:>7.1f} {rises[-1]:>+6.1f}", flush=True)
    print(f"least rise {min(rises):+.1f} points, target +{TARGET:.0f}: {'met' if min(rises) >= TARGET else 'missed'}")


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
