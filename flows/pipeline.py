"""The Prefect flow: dvc.yaml's DAG walked, each stage a task run. `python -m flows.pipeline` runs it here; prefect.yaml deploys it.

Prefect decides when and where, DVC alone decides what is skipped: no task here caches or keeps a result. A failed stage comes back
as a state with its one-line error, not as an exception, so that nobody reads a traceback for a typo.
"""

import argparse
import contextlib
import signal
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.console import Console
from flows.run import Request, Run
from flows.server import EphemeralServer, api_configured, prefect_settings
from k2 import presets
from k2.errors import K2Error

Value = bool | int | float | str | list[Any] | dict[str, Any] | None
PREFECT_HOME = Path(".k2/prefect")
_OPENED: ContextVar[Run | None] = ContextVar("opened", default=None)


@task(task_run_name="{stage}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_stage(stage: str, run: Run, console: Console) -> State:
    """One stage; its upstream tasks have completed."""
    outcome = run.execute(stage, console)
    if outcome.status == "failed":
        return Failed(message=outcome.error)
    return Completed(name="Cached" if outcome.status == "cached" else "Completed", message=outcome.headline or outcome.status)


@flow(name="pipeline", task_runner=ThreadPoolTaskRunner(), persist_result=False, retries=0)  # type: ignore[arg-type]
def pipeline(
    preset: Annotated[str | None, Field(description="A preset laid over params.yaml, e.g. micro.")] = None,
    overrides: Annotated[dict[str, Value] | None, Field(description='Single keys, e.g. {"sft.optim.lr": 0.001}.')] = None,
    from_stage: Annotated[str | None, Field(description="This stage and what follows it.")] = None,
    to_stage: Annotated[str | None, Field(description="This stage and what it needs.")] = None,
    name: Annotated[str | None, Field(description="Name of the DVC experiment of a run with preset or overrides.")] = None,
    concurrency: Annotated[int, Field(ge=1, description="Stages that may run side by side.")] = 2,
) -> State:
    """K2's training recipe, corpus to publish. With a preset or overrides it runs beside the checkout and ends as an experiment."""
    return _walk(Request(preset, overrides or {}, from_stage, to_stage, None, name, concurrency))


@flow(name="stage", task_runner=ThreadPoolTaskRunner(), persist_result=False, retries=0)  # type: ignore[arg-type]
def stage(stage: Annotated[str, Field(description="A stage of dvc.yaml.")]) -> State:
    """One stage alone, its inputs taken as they are."""
    return _walk(Request(stage=stage))


def _walk(request: Request) -> State:
    if (opened := _OPENED.get()) is not None:  # by the command line
        return _submit(opened, Console())
    console = Console(get_run_logger())
    try:
        with Run(Path.cwd(), request) as run:
            return _submit(run, console)
    except K2Error as error:
        return Failed(message=str(error))


def _submit(run: Run, console: Console) -> State:
    futures: dict[str, Any] = {}
    try:
        for name in run.names:
            upstream = [futures[parent] for parent in run.dag.upstream[name] if parent in futures]
            futures[name] = run_stage.with_options(name=name).submit(name, run, console, wait_for=upstream)  # type: ignore[call-overload]
        for future in futures.values():
            future.wait()
    except BaseException:  # cancelled, interrupted, terminated: the stages' processes end first, then Prefect may tidy up
        run.children.stop()
        raise
    outcomes = [run.skip(name) for name in run.names]
    run.finish(console)
    if failed := [o for o in outcomes if o.status == "failed"]:
        return Failed(message="; ".join(o.error for o in failed))
    return Completed(message=f"{sum(o.status == 'run' for o in outcomes)} of {len(outcomes)} stages ran")


# -- the command line -------------------------------------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> int:
    """`python -m flows.pipeline`. Returns the exit code: a failed stage's, 2 for a configuration error, 130 and 143 for signals."""
    request = parse_arguments(arguments)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _terminate)
    try:
        with Run(Path.cwd(), request) as run:
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
    with contextlib.ExitStack() as ending:
        address = None
        if not api_configured():
            server = EphemeralServer(run.base / PREFECT_HOME)
            ending.callback(server.stop)
            run.children.adopt(server.group)
            address = server.address
        ending.enter_context(prefect_settings(address, run.base / PREFECT_HOME))
        token = _OPENED.set(run)
        ending.callback(_OPENED.reset, token)
        asked = run.request
        if asked.stage is not None:
            stage(asked.stage, return_state=True)
        else:
            pipeline(
                asked.preset, asked.overrides or None, asked.from_stage, asked.to_stage, asked.name, asked.concurrency,
                return_state=True,
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
    given = parser.parse_args(arguments)
    try:
        overrides = dict(presets.parse_override(text) for text in given.set)
    except K2Error as error:
        parser.exit(2, f"error: {error}\n")
    return Request(given.preset, overrides, given.from_stage, given.to_stage, given.stage, given.name, given.concurrency)


if __name__ == "__main__":
    sys.exit(main())
