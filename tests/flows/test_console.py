"""A person sees bars move, a log file sees them now and then, and both see one line at a stage's start and end."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from flows.console import Console
from flows.repro import Outcome

TALK = """
from flows.console import Console
from flows.repro import Outcome
console = Console()
console.started("sft")
for percent in (10, 20):
    console.output("sft", f"   sft: {percent}%", False)
console.output("sft", "a line", True)
console.output("sft", "   sft: 30%", False)
console.ended(Outcome("sft", "run", 12.34, headline="loss 1.5"))
"""


def test_on_a_terminal_a_bar_moves_in_place(tmp_path: Path):
    """Each state overwrites the one before; a line takes its place and the bar goes on below; nothing of it is left."""
    master, slave = pty.openpty()
    subprocess.run([sys.executable, "-c", TALK], stderr=slave, check=True)
    os.close(slave)
    seen = os.read(master, 65536).decode().replace("\r\n", "\n")
    os.close(master)
    assert seen == (
        "> sft\n\r\x1b[K   sft: 10%\r\x1b[K   sft: 20%\r\x1b[K"
        "         sft | a line\n\r\x1b[K   sft: 30%\r\x1b[K= sft  12.3 s  loss 1.5\n"
    )  # fmt: skip


def test_in_a_file_a_bar_is_a_line_now_and_then(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """The first state only starts the clock; a failed stage shows its error."""
    console = Console()
    for percent in (10, 20, 30):
        console.output("sft", f"   sft: {percent}%", False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("flows.console.BAR_SECONDS", 0.0)
    console.output("sft", "   sft: 40%", False)
    console.ended(Outcome("sft", "failed", 1.0, "sft: it is broken; mend it", 1))
    assert capsys.readouterr().err == "   sft: 40%\nx sft  sft: it is broken; mend it\n"


def test_the_table_says_what_ran_and_what_was_cached(capsys: pytest.CaptureFixture):
    """One row a stage: seconds where it ran, its status, its headline; then the sum, and the report's path unbroken."""
    report = Path("/a/very/long/path" * 10)
    Console().table(
        [Outcome("corpus", "cached", headline="kept 2"), Outcome("sft", "run", 12.34, headline="loss 1.5")], 150.0, report, "t"
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line.split() for line in lines[2:4]] == [["corpus", "-", "cached", "kept", "2"], ["sft", "12.3", "run", "loss", "1.5"]]
    assert lines[4:] == ["1 of 2 stages cached; 2.5 min in all", f"report: {report}"]
