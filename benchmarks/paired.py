"""Two or more ways to do the same work, timed in turn so that all meet the same machine, and how a result is printed.

Import this before torch is used: it sets OpenMP's spin, as every stage does.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(sides: Mapping[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each side, `repetitions` of each, alternating; the first round of all warms up and is not kept."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-1, repetitions):
        for name, work in sides.items():
            took = seconds(work)
            if i >= 0:
                times[name].append(took)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster ours is: the median over neighbouring runs."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Verdict:
    """A line of the summary that `make bench` ends with."""

    work: str
    peer: str
    found: float
    target: float
    unit: str = "x"
    at_most: bool = False  # the target is an upper bound

    @property
    def met(self) -> bool:
        return self.found <= self.target if self.at_most else self.found >= self.target

    def cells(self) -> list[str]:
        bound = f"{'<=' if self.at_most else '>='} {self.target:g} {self.unit}"
        gap = "met" if self.met else f"missed: {self.found / self.target:.0%} of it"
        return [self.work, self.peer, f"{self.found:.2f} {self.unit}", bound, gap]


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))), flush=True)


def summary(verdicts: Sequence[Verdict]) -> None:
    table("summary", ["work", "peer", "found", "target", ""], [v.cells() for v in verdicts])
