"""One progress bar for every long loop: rate and ETA, on stderr, whether or not that is a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def bar(description: str, total: float, unit: str, initial: float = 0) -> Any:
    """A tqdm bar to `update(n)` by hand. Counts are scaled (1.2M), `unit` names what is counted."""
    return tqdm(
        total=total, initial=initial, desc=f"{description:>12}", unit=unit, unit_scale=True, smoothing=0.1, mininterval=0.5,
        file=sys.stderr, ncols=None if sys.stderr.isatty() else 100,
    )  # fmt: skip


def track(items: Iterable[T], description: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate under a bar."""
    if total is None:
        items = list(items)
        total = len(items)
    with bar(description, total, unit) as progress:
        for item in items:
            yield item
            progress.update(1)
