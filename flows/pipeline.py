"""The Prefect flow: dvc.yaml's DAG walked, each stage a task run. `python -m flows.pipeline` runs it here; prefect.yaml deploys it.

Prefect decides when and where, DVC alone decides what is skipped: no task here caches or keeps a result. A failed stage comes back
as a state with its one-line error, not as an exception, so that nobody reads a traceback for a typo.
"""

import sys

if __name__ == "__main__":  # the command line spares itself the import of Prefect when there is nothing to walk
    from flows.cli import main

    sys.exit(main())

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
from k2.errors import ConfigError, K2Error

Value = bool | int | float | str | list[Any] | dict[str, Any] | None
OPENED: ContextVar[Run | None] = ContextVar("opened", default=None)  # the command line's run, already open


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
    retries: Annotated[int, Field(ge=0, description="Times a failed stage is run again; never for a configuration error.")] = 0,
) -> State:
    """K2's training recipe, corpus to publish. With a preset or overrides it runs beside the checkout and ends as an experiment."""
    return _walk(Request(preset, overrides or {}, from_stage, to_stage, None, name, concurrency, retries))


@flow(name="stage", task_runner=ThreadPoolTaskRunner(), persist_result=False, retries=0)  # type: ignore[arg-type]
def stage(stage: Annotated[str, Field(description="A stage of dvc.yaml.")]) -> State:
    """One stage alone, its inputs taken as they are."""
    return _walk(Request(stage=stage))


def _walk(request: Request) -> State:
    if (opened := OPENED.get()) is not None:  # by the command line
        return _submit(opened, Console())
    console = Console(get_run_logger())
    try:
        with Run(Path.cwd(), request) as run:
            return _submit(run, console)
    except K2Error as error:
        return Failed(message=str(error))


def _submit(run: Run, console: Console) -> State:
    def may_pass(task: Any, task_run: Any, state: Any) -> bool:
        return run.outcomes[task.name].exit_code != ConfigError.exit_code and not run.children.stopped

    def options(name: str) -> Any:
        return run_stage.with_options(name=name, retries=run.request.retries, retry_delay_seconds=5, retry_condition_fn=may_pass)

    futures: dict[str, Any] = {}
    try:
        for name in run.names:
            upstream = [futures[parent] for parent in run.dag.upstream[name] if parent in futures]
            futures[name] = options(name).submit(name, run, console, wait_for=upstream)
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
