"""`python -m flows.pipeline`: run the recipe here, through Prefect if there is anything to run."""

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from flows.console import Console
from flows.run import Request, Run
from flows.server import EphemeralServer, api_configured, prefect_settings
from k2 import presets
from k2.errors import K2Error

PREFECT_HOME = Path(".k2/prefect")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: a failed stage's, 2 for a configuration error, 130 and 143 for signals."""
    request = parse_arguments(arguments)
    try:
        run = Run(Path.cwd(), request)
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, _terminate)
        with run:
            if api_configured() or not all(run.up_to_date(name) for name in run.names):
                _with_prefect(run)
            else:  # nothing to walk: spare the seconds that a server takes to start
                console = Console()
                for name in run.names:
                    run.execute(name, console)
                run.finish(console)
            return next((o.exit_code or 1 for o in run.outcomes.values() if o.status == "failed"), 0)
    except K2Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run again to go on from where it was", file=sys.stderr)
        return 130


def _with_prefect(run: Run) -> None:
    """The flow, in this process, against the user's Prefect server or a temporary one."""
    os.environ.setdefault("DO_NOT_TRACK", "1")  # Prefect's usage data, and its notice about them
    from flows import pipeline

    with contextlib.ExitStack() as ending:
        address = None
        if not api_configured():
            server = EphemeralServer(run.base / PREFECT_HOME)
            ending.callback(server.stop)
            run.children.adopt(server.group)
            address = server.address
        ending.enter_context(prefect_settings(address, run.base / PREFECT_HOME))
        token = pipeline.OPENED.set(run)
        ending.callback(pipeline.OPENED.reset, token)
        asked = run.request
        one: Any = pipeline.stage
        whole: Any = pipeline.pipeline
        if asked.stage is not None:
            one(asked.stage, return_state=True)
        else:
            whole(
                asked.preset, asked.overrides or None, asked.from_stage, asked.to_stage, asked.name, asked.concurrency,
                asked.retries, return_state=True,
            )  # fmt: skip


def _terminate(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def parse_arguments(arguments: list[str] | None) -> Request:
    parser = argparse.ArgumentParser("python -m flows.pipeline", description="Run the recipe; what is up to date is not run again.")
    parser.add_argument("--preset", help=f"laid over params.yaml: {', '.join(presets.names())}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. sft.optim.lr=1e-3; repeatable")
    parser.add_argument("--from", dest="from_stage", metavar="STAGE", help="this stage and what follows it")
    parser.add_argument("--to", dest="to_stage", metavar="STAGE", help="this stage and what it needs")
    parser.add_argument("--stage", help="this stage alone")
    parser.add_argument("--name", help="name of the experiment of a run with --preset or --set")
    parser.add_argument("--concurrency", type=int, default=2, help="stages side by side (default 2)")
    parser.add_argument("--retries", type=int, default=0, help="times a failed stage is run again (default 0)")
    given = parser.parse_args(arguments)
    try:
        overrides = dict(presets.parse_override(text) for text in given.set)
    except K2Error as error:
        parser.exit(2, f"error: {error}\n")
    return Request(
        given.preset, overrides, given.from_stage, given.to_stage, given.stage, given.name, given.concurrency, given.retries
    )
