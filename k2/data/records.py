"""Documents and dialogues on disk: JSON Lines, UTF-8, one object a line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
