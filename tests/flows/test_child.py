"""No process outlives the flow."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from flows.child import Children

FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a stubborn stage
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "w").write(f"{os.getpid()} {grandchild.pid}")
time.sleep(600)
"""


def pids(folder: Path) -> list[int]:
    until = time.monotonic() + 20
    while not (folder / "pids").exists() or len((folder / "pids").read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def gone(processes: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_stop_ends_a_stubborn_family_within_ten_seconds(tmp_path: Path):
    """A child that ignores SIGTERM and its own child are gone, and nothing starts any more."""
    children = Children()
    codes: list[int] = []
    run = lambda: codes.append(children.run([sys.executable, "-c", FAMILY], tmp_path, dict(os.environ), lambda text, whole: None))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    family = pids(tmp_path)
    started = time.monotonic()
    children.stop()
    thread.join(10)
    assert gone(family, 0.1) and time.monotonic() - started < 10
    assert codes == [-signal.SIGKILL]
    assert children.run(["true"], tmp_path, dict(os.environ), lambda text, whole: None) == -signal.SIGTERM
    children.close()


def test_kill_9_of_the_flow_takes_its_children_along(tmp_path: Path):
    """Nobody is left to tidy up but the watchdog, which does, and then ends itself."""
    flow = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; from pathlib import Path; from flows.child import Children; "
         "Children().run([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]), dict(os.environ), print)", FAMILY, str(tmp_path)]
    )  # fmt: skip
    family = pids(tmp_path)
    watchdog = next(p.pid for p in psutil.Process(flow.pid).children() if "reaper" in " ".join(p.cmdline()))
    flow.kill()
    flow.wait()
    assert gone([*family, watchdog], 10)


def test_what_a_command_leaves_in_its_group_ends_with_it(tmp_path: Path):
    """A stage that forgot a background process does not keep it."""
    children = Children()
    children.run(
        ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $! $! > pids"], tmp_path, dict(os.environ), lambda text, whole: None
    )
    assert gone(pids(tmp_path), 1)
    children.close()


def test_output_is_cut_into_lines_and_bar_states(tmp_path: Path):
    """Newlines end lines, carriage returns make bar states, bytes that are not UTF-8 harm nobody."""
    children, heard = Children(), []
    script = r"import sys; o = sys.stdout.buffer; o.write(b'one\n\r 10%\r 20%\r100%\ntwo \xff\r\nlast'); o.flush()"
    code = children.run([sys.executable, "-c", script], tmp_path, dict(os.environ), lambda text, whole: heard.append((text, whole)))
    children.close()
    assert code == 0
    assert [text for text, whole in heard if whole] == ["one", "100%", "two \N{REPLACEMENT CHARACTER}", "last"]
    assert [text.strip() for text, whole in heard if not whole and text.strip()][:2] == ["10%", "20%"]
