"""What a person sees: one line at the start and end of a stage, its bar in between, and a table at the end.

On a terminal a bar moves in place; in a file or a CI log its state is a line every ten seconds; under a Prefect server everything
goes to the run's logger instead.
"""

import logging
import shutil
import sys
import threading
import time
from pathlib import Path

from rich.console import Console as Rich
from rich.table import Table

from flows.repro import Outcome

BAR_SECONDS = 10.0  # between two states of a bar where it cannot move
STYLES = {"run": "green", "cached": "cyan", "failed": "bold red", "skipped": "dim"}


class Console:
    def __init__(self, logger: logging.Logger | logging.LoggerAdapter | None = None) -> None:
        self._logger, self._lock = logger, threading.Lock()
        self._moving = logger is None and sys.stderr.isatty()
        self._bar, self._last = "", {}

    def line(self, text: str) -> None:
        with self._lock:
            if self._logger is not None:
                self._logger.info(text)
                return
            sys.stderr.write(("\r\x1b[K" if self._moving and self._bar else "") + text + "\n")
            if self._moving and self._bar:
                sys.stderr.write(self._bar)
            sys.stderr.flush()

    def output(self, stage: str, text: str, whole: bool) -> None:
        """A line of a stage, or the present state of its bar."""
        text = text.strip("\r\n")
        if not text.strip():
            return
        if whole:
            self.clear(stage)
            self.line(_labelled(stage, text))
        elif self._moving:
            with self._lock:
                self._bar = f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}"
                sys.stderr.write(self._bar)
                sys.stderr.flush()
        elif time.monotonic() - self._last.setdefault(stage, time.monotonic()) > BAR_SECONDS:
            self._last[stage] = time.monotonic()
            self.line(_labelled(stage, text))

    def clear(self, stage: str) -> None:
        """The stage's bar has gone."""
        with self._lock:
            self._last.pop(stage, None)
            if self._moving and self._bar:
                sys.stderr.write("\r\x1b[K")
                self._bar = ""

    def started(self, stage: str) -> None:
        self.line(f"> {stage}")

    def ended(self, outcome: Outcome) -> None:
        self.clear(outcome.stage)
        if outcome.status == "failed":
            self.line(f"x {outcome.stage}  {outcome.error}")
        else:
            took = "cached" if outcome.status == "cached" else f"{outcome.seconds:.1f} s"
            self.line(f"= {outcome.stage}  {took}  {outcome.headline}".rstrip())

    def table(self, outcomes: list[Outcome], seconds: float, report: Path | None, title: str) -> None:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name, justify in (("stage", "left"), ("seconds", "right"), ("", "left"), ("headline", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for o in outcomes:
            status = f"[{STYLES[o.status]}]{o.status}[/]"
            table.add_row(o.stage, f"{o.seconds:.1f}" if o.status in ("run", "failed") else "-", status, o.headline)
        total = f"{seconds / 60:.1f} min" if seconds >= 100 else f"{seconds:.1f} s"
        cached = sum(o.status == "cached" for o in outcomes)
        everything = "everything is up to date" if cached == len(outcomes) else f"{cached} of {len(outcomes)} stages cached"
        rich = Rich(width=None if sys.stdout.isatty() else 100, highlight=False)
        with rich.capture() as captured:
            rich.print(table)
            rich.print(f"{everything}; {total} in all")
            if report is not None:
                rich.print(f"report: {report}", soft_wrap=True)
        if self._logger is not None:
            self._logger.info("\n%s", captured.get())
        else:
            sys.stdout.write("\n" + captured.get())
            sys.stdout.flush()


def _labelled(stage: str, text: str) -> str:
    """The stage's name before its line, unless the line (a bar, an error) begins with it."""
    return text if text.lstrip().startswith(f"{stage}:") else f"{stage:>12} | {text}"
