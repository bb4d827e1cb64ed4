"""A command as a child in a process group of its own: its output streamed, and no way for it to outlive the flow."""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from flows import reaper

Chunk = Callable[[str, bool], None]  # (text, whole): a whole line, or the present state of a progress bar


class Children:
    """The processes of one flow run. `stop` ends them all, now and for good; a watchdog does so if this process dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self.stopped = False
        script = [sys.executable, "-S", "-E", reaper.__file__]
        self._watchdog = subprocess.Popen(script, stdin=subprocess.PIPE, start_new_session=True, cwd="/")

    def run(self, command: Sequence[str], cwd: Path, env: dict[str, str], on_output: Chunk) -> int:
        """Run to the end, handing on stdout and stderr as they come. Returns the exit code, negative for a signal."""
        with self._lock:
            if self.stopped:
                return -signal.SIGTERM
            child = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._watch("+", child.pid)
        try:
            assert child.stdout is not None
            _stream(child.stdout.fileno(), on_output)
            return child.wait()
        finally:
            reaper.end_groups({child.pid})  # what the command itself left behind
            child.wait()
            with self._lock:
                self._watch("-", child.pid)

    def stop(self) -> None:
        """End every process within 10 seconds and let none start."""
        with self._lock:
            self.stopped, groups = True, set(self._groups)
        reaper.end_groups(groups)

    def close(self) -> None:
        """Stop, and dismiss the watchdog."""
        self.stop()
        with contextlib.suppress(OSError):
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def adopt(self, group: int) -> None:
        """Watch over a process group that was started elsewhere (the ephemeral server): the watchdog ends it too."""
        self._tell("+", group)

    def _watch(self, sign: str, group: int) -> None:
        (self._groups.add if sign == "+" else self._groups.discard)(group)
        self._tell(sign, group)

    def _tell(self, sign: str, group: int) -> None:
        with contextlib.suppress(OSError):  # someone has killed the watchdog
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.write(f"{sign}{group}\n".encode())
            self._watchdog.stdin.flush()


def _stream(source: int, on_output: Chunk) -> None:
    """Cut a stream at line ends and carriage returns."""
    decoder, held, bar = codecs.getincrementaldecoder("utf-8")("replace"), "", False
    while data := os.read(source, 65536):
        held += decoder.decode(data).replace("\r\n", "\n")
        while (cut := min((i for i in (held.find("\n"), held.find("\r")) if i >= 0), default=-1)) >= 0:
            on_output(held[:cut], held[cut] == "\n")
            held, bar = held[cut + 1 :], held[cut] == "\r"
        if held and bar:  # tqdm writes "\r" first, then the bar
            on_output(held, False)
    if held:
        on_output(held, True)
