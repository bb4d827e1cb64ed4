"""Whole or not at all: output folders appear by one rename, with checksums inside, and are checked when they are read.

This is the one module that touches fsspec, so that every path may be local or a URL (s3://, hf://, https://).
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from k2.errors import K2Error

MANIFEST = "manifest.json"
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
ATTEMPTS = 3  # for a remote place that does not answer; the wait doubles from one second
T = TypeVar("T")


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` (file or folder, yours to create) that is flushed and renamed to it when the block succeeds."""
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        yield partial
        if partial.is_dir():
            seal(partial)
        else:
            _flush(partial)
        if path.is_dir():  # a folder cannot be replaced in one step: at no moment is half of it there
            remove(old)
            os.replace(path, old)
        os.replace(partial, path)
    except Exception as error:
        if disk_is_full(error):
            raise K2Error(f"{path}: the disk is full; free some space and run again (nothing half-written is left)") from error
        raise
    finally:
        remove(partial)
        remove(old)


def disk_is_full(error: BaseException) -> bool:
    """Whether this is ENOSPC or a quota, also where a library wraps it in an error of its own (safetensors does)."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def seal(folder: Path) -> None:
    """Write manifest.json, the size and SHA-256 of each file, last."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
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
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
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


# -- reading a local path or a URL ------------------------------------------------------------------------------------------------
def list_files(source: str) -> list[str]:
    """Files at a local path or fsspec URL: the file itself, or all in the folder and below, sorted, hidden ones left out.

    An http(s) address is always one file. K2Error when there is nothing or the place cannot be reached.
    """
    if source.startswith(("http://", "https://")):
        return [source]
    import fsspec

    def find() -> list[str]:
        system, path = fsspec.core.url_to_fs(source)
        if not system.exists(path):
            raise FileNotFoundError
        root = path.rstrip("/")
        names = sorted(name for name in system.find(root) if not any(part.startswith(".") for part in name[len(root) :].split("/")))
        return [system.unstrip_protocol(name) if is_remote(source) else name for name in names]

    return _reach(source, find)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[IO[bytes]]:
    """Open a local path or URL for reading, decompressed by its ending (COMPRESSIONS). Any failure is a K2Error that names it."""
    import fsspec

    def start() -> Any:
        system, name = fsspec.core.url_to_fs(path)
        ending = suffix(path)
        if ending == ".zst":  # fsspec's reader stops after the first of several frames
            import zstandard

            return zstandard.ZstdDecompressor().stream_reader(system.open(name, "rb"), read_across_frames=True)
        return fsspec.core.OpenFile(system, name, "rb", compression=COMPRESSIONS.get(ending)).open()

    opened = _reach(path, start)
    try:
        with opened as file:
            yield file
    except K2Error:
        raise
    except Exception as error:  # each file system and codec has its own
        raise _explain(path, error) from None


def suffix(path: str) -> str:
    """The last ending of a path or URL, in small letters, without a query."""
    return os.path.splitext(path.split("?")[0])[1].lower()


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith(("file://", "local://"))


def _reach(path: str, action: Callable[[], T]) -> T:
    """Run `action`; for a remote path, again after a pause when the failure may pass."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:  # each file system has its own kinds
            cause = error.__cause__
            if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and not hasattr(cause, "status"):
                error = cause  # how fsspec's http reports a network that is down; an answer of the server has a status
            final = isinstance(error, (FileNotFoundError, PermissionError, ImportError, ValueError))
            if final or attempt == ATTEMPTS or not is_remote(path):
                raise _explain(path, error) from None
            time.sleep(2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _explain(path: str, error: Exception) -> K2Error:
    """One line for what a file system, a codec or the network raised."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return K2Error(f"{path}: not found; check the path" + (" and that you may read it" if is_remote(path) else ""))
    if isinstance(error, PermissionError):
        return K2Error(f"{path}: no permission to read it ({reason}); check the file's mode or your credentials")
    if isinstance(error, (ImportError, ValueError)) and is_remote(path):
        return K2Error(f"{path}: this kind of address cannot be opened ({reason})")
    if is_remote(path):
        return K2Error(
            f"{path}: cannot be reached ({type(error).__name__}: {reason}); check the network, the address and credentials"
        )
    return K2Error(f"{path}: not readable ({reason}); the file may be damaged")
