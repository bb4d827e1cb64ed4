"""The DAG, read from dvc.yaml: who needs whom, in which order, and which part of it was asked for."""

import difflib
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any

from k2.errors import ConfigError
from tasks.stage import MADE, paths, read_dag


@dataclass(frozen=True)
class Dag:
    """`upstream[stage]` are the stages whose outputs it reads. Both mappings keep a topological order."""

    stages: dict[str, dict[str, Any]]
    upstream: dict[str, set[str]]

    def select(self, start: str | None = None, end: str | None = None, only: str | None = None) -> list[str]:
        """Stages to run, in order: `start` and all that follows it, `end` and all that it needs, both, or one alone."""
        for name in (start, end, only):
            if name is not None and name not in self.stages:
                close = difflib.get_close_matches(name, self.stages, n=1)
                hint = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(self.stages)}"
                raise ConfigError(f"stage `{name}` is not in dvc.yaml; {hint}")
        if only is not None:
            return [only]
        after = self.stages.keys() if start is None else {start} | self.descendants(start)
        before = self.stages.keys() if end is None else {end} | self.ancestors(end)
        chosen = [name for name in self.stages if name in after and name in before]
        if not chosen:
            raise ConfigError(f"no stage lies between `{start}` and `{end}`; `dvc dag` shows the order")
        return chosen

    def ancestors(self, name: str) -> set[str]:
        return self.upstream[name].union(*(self.ancestors(parent) for parent in self.upstream[name]))

    def descendants(self, name: str) -> set[str]:
        return {other for other in self.stages if name in self.ancestors(other)}


def load_dag(root: Path) -> Dag:
    """Read dvc.yaml in `root`. ConfigError if its stages need each other in a circle."""
    stages = read_dag(root)
    made = {path: name for name, entry in stages.items() for kind in MADE for path in paths(entry, kind)}
    upstream = {
        name: {made[path] for dep in paths(entry, "deps") for path in made if _overlap(dep, path) and made[path] != name}
        for name, entry in stages.items()
    }
    try:
        order = list(TopologicalSorter(upstream).static_order())
    except CycleError as error:
        raise ConfigError(f"dvc.yaml: stages need each other in a circle: {' -> '.join(error.args[1])}") from None
    return Dag({name: stages[name] for name in order}, {name: upstream[name] for name in order})


def _overlap(a: str, b: str) -> bool:
    """Whether one path is the other or lies inside it."""
    one, other = PurePosixPath(a), PurePosixPath(b)
    return one.is_relative_to(other) or other.is_relative_to(one)
