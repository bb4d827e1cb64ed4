"""Whole or not at all: output folders appear by one rename, with checksums inside, and are checked when they are read.

This is the one module that touches fsspec, so that every path may be local or a URL (s3://, hf://, https://).
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from k2.errors import K2Error

MANIFEST = "manifest.json"


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` (file or folder, yours to create) that is flushed and renamed to it when the block succeeds."""
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    try:
        yield partial
        if partial.is_dir():
            seal(partial)
        else:
            _flush(partial)
        remove(path)
        os.replace(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise K2Error(f"{path}: the disk is full; free some space and run again (nothing half-written is left)") from error
        raise
    finally:
        remove(partial)


def seal(folder: Path) -> None:
    """Write manifest.json, the size and SHA-256 of each file, last."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    entries = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    for p in files:
        _flush(p)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": entries}, indent=1, sort_keys=True) + "\n")
    _flush(manifest)


def verify(folder: Path) -> Path:
    """Check a sealed folder against its manifest and return it. K2Error names the file that is missing or differs."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        raise K2Error(f"{folder}: not a finished output ({MANIFEST} is missing); run the stage that makes it again") from None
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
        raise K2Error(f"{folder / MANIFEST}: not readable; delete {folder} and run the stage that makes it again") from None
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise K2Error(f"{path}: missing; delete {folder} and run the stage that makes it again (`dvc repro` or `dvc checkout`)")
        if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
            raise K2Error(
                f"{path}: checksum differs, the file is damaged; delete it and run `dvc checkout` or the stage that makes it"
            )
    return folder


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file or folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
