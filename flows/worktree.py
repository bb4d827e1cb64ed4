"""A run with other params never touches the checkout: it gets a git worktree, which shares DVC's cache and the resume states."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.repro import DVC
from k2 import presets
from k2.config import parse_params
from k2.errors import K2Error
from k2.redact import redact

FOLDER = Path(".k2/worktrees")
SMALL = 1 << 20  # bytes; larger untracked files are linked, not copied, and stay out of the experiment


def resolve_params(root: Path, preset: str | None, overrides: dict[str, Any]) -> str:
    """params.yaml's text with preset and overrides applied, checked. ConfigError names the key."""
    text = (root / "params.yaml").read_text()
    if preset is not None:
        text = presets.overlay(text, preset)
    if overrides:
        text = presets.override(text, overrides)
    if preset is not None or overrides:
        parse_params(text, "params.yaml with the overrides")
    return text


def run_name(preset: str | None, overrides: dict[str, Any]) -> str:
    """A readable name from what differs: `micro-sft.optim.lr-0.001`."""
    parts = ([preset] if preset else []) + [f"{key}-{value}" for key, value in overrides.items()]
    return re.sub(r"([.-])[.-]+", r"\1", re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)))[:80].strip("-.")


@contextlib.contextmanager
def open_worktree(root: Path, name: str, params: str) -> Iterator[Path]:
    """HEAD, the uncommitted changes and `params` in .k2/worktrees/<name>; gone at the end, whichever way it comes."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is None:
        raise K2Error(f"name `{name}`: use letters, digits, '.', '_' and '-'")
    path = root / FOLDER / name
    _refuse_if_running(path, name)
    _remove(root, path)
    try:
        _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--quiet", "--detach", str(path), "HEAD")
        _bring_changes(root, path)
        (path / "params.yaml").write_text(params)
        _share(root, path)
        _dvc(path, "checkout", "--quiet", "--force", "--allow-missing")
        yield path
    finally:
        _remove(root, path)


def save_experiment(path: Path, name: str) -> None:
    """Keep the worktree's state as a DVC experiment, which `dvc exp show` in the checkout lists and `dvc exp apply` applies."""
    small = [file for file in _untracked(path) if (path / file).stat().st_size <= SMALL and not (path / file).is_symlink()]
    include = [option for file in small for option in ("--include-untracked", file)]
    _dvc(path, "exp", "save", "--quiet", "--force", "--name", name, *include)


def _bring_changes(root: Path, path: Path) -> None:
    if changes := _git(root, "diff", "--binary", "HEAD"):
        _git(path, "apply", "--whitespace=nowarn", input=changes)
    for file in _untracked(root):
        source, target = root / file, path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or source.stat().st_size <= SMALL:
            shutil.copy2(source, target, follow_symlinks=False)
        else:
            target.symlink_to(source.resolve())


def _share(root: Path, path: Path) -> None:
    """DVC's cache and remotes, and the resume states, are the checkout's."""
    from dvc.config import Config
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        cache = repo.cache.local_cache_dir
    local = root / ".dvc/config.local"
    if local.exists():
        shutil.copy2(local, path / ".dvc/config.local")
    with Config(str(path / ".dvc")).edit("local") as config:
        config["cache"]["dir"] = str(cache)  # pyright: ignore
    (path / ".k2").mkdir()
    for shared in ("resume", "llm"):  # states of killed stages, unpacked language models
        (root / ".k2" / shared).mkdir(parents=True, exist_ok=True)
        (path / ".k2" / shared).symlink_to((root / ".k2" / shared).resolve())
    (path / ".k2/process").write_text(str(os.getpid()))


def _refuse_if_running(path: Path, name: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        pid = int((path / ".k2/process").read_text())
        os.kill(pid, 0)
        raise K2Error(f"a run named `{name}` is in progress (process {pid}); wait for it or give this one another --name")


def _remove(root: Path, path: Path) -> None:
    if path.exists():
        with contextlib.suppress(K2Error):
            _git(root, "worktree", "remove", "--force", str(path))
        shutil.rmtree(path, ignore_errors=True)
        _git(root, "worktree", "prune")


def _untracked(root: Path) -> list[str]:
    return [os.fsdecode(name) for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0") if name]


def _git(root: Path, *arguments: str, input: bytes | None = None) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, input=input, capture_output=True)
    if done.returncode:
        raise K2Error(
            f"git {arguments[0]}: {redact(' '.join(done.stderr.decode(errors='replace').split()))} (overrides need a git clone)"
        )
    return done.stdout


def _dvc(path: Path, *arguments: str) -> None:
    done = subprocess.run([*DVC, *arguments], cwd=path, capture_output=True, text=True)
    if done.returncode:
        raise K2Error(f"dvc {arguments[0]}: {redact(' '.join(done.stderr.split()))}")
