"""The watchdog: a small process that outlives the flow just long enough to end what the flow has left behind.

It reads `+<group>` and `-<group>` lines from its parent. When the pipe closes, the parent has gone, however it went (kill -9 too):
groups still on the list are ended, politely and then not. Standard library only, so that it starts in milliseconds.
"""

import contextlib
import os
import signal
import sys
import time

GRACE_SECONDS = 5.0


def end_groups(groups: set[int], grace: float = GRACE_SECONDS) -> None:
    """SIGTERM to process groups, SIGKILL after `grace` seconds to those that are still there."""
    for sign, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 2.0)):
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)
        until = time.monotonic() + patience
        while any(group_exists(group) for group in groups):
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        else:
            return


def group_exists(group: int) -> bool:
    """Whether any process of the group is there and not a zombie."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return not os.path.isdir("/proc/self") or any(_is_member(pid, group) for pid in os.listdir("/proc") if pid.isdigit())


def _is_member(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, _, pgrp = file.read().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(pgrp) == group and state not in "ZX"


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    end_groups(groups)


if __name__ == "__main__":
    main()
