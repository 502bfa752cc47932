"""`kfp-ddp describe` and `logs`: why a run failed or waits, and what its steps wrote."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo, echo_json

if TYPE_CHECKING:
    from kfp_ddp.client.description import Description
    from kfp_ddp.core.config import Connection

EVENTS = 8
"""Number of printed events; --json has all."""


@click.command("describe")
@click.argument("run")
@click.option(
    "--files/--no-files",
    default=True,
    help="Read the run's files for its newest checkpoint; on a PVC this starts a pod.",
)
@AS_JSON
@connected
def describe(run: str, files: bool, as_json: bool, connection: "Connection") -> None:
    """Show how RUN ended, why, and what to do next.

    The output has the failed step and its cause in one line, warnings of its pods, the newest
    checkpoint of each training, and the next command. Information that cannot be read, such as
    pods without a kubeconfig, is left out with a note.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local.

    kfp-ddp describe last
    """
    from kfp_ddp.client.description import describe
    from kfp_ddp.client.run_info import run_finder

    with run_finder(connection) as finder:
        description = describe(finder.find(run), finder.api, files)
    if as_json:
        echo_json(description.document())
        return
    for line in _lines(description):
        echo(line)


@click.command("logs")
@click.argument("run")
@click.argument("step", default="")
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until the steps are over.")
@click.option("--all", "every", is_flag=True, help="Also print the lines of KFP and Argo.")
@connected
def logs(run: str, step: str, follow: bool, every: bool, connection: "Connection") -> None:
    """Print the logs of the steps of RUN, or of STEP.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. STEP is
    a step's name, such as train, whose log contains those of all its ranks; a group of steps,
    such as training; or a step of a loop with its number, such as 0/train. With several steps,
    each line starts with the step's name. The lines of KFP and Argo are left out. If a pod was
    deleted, the log that KFP stores is read, if the pipeline root is gs:// or s3://.

    kfp-ddp logs last train -f
    """
    from kfp_ddp.client import logs
    from kfp_ddp.client.run_info import run_finder

    with run_finder(connection) as finder:
        info = finder.find(run)
        prefix = len(logs.select_steps(info, step)) > 1
        if not follow or info.folder is not None:
            logs.print_logs(info, step, finder.api, every)
            return
        try:
            logs.follow(info, step, finder.api(), lambda: finder.find(info.id), prefix, every)
        except KeyboardInterrupt:
            raise SystemExit(130) from None


def _lines(description: "Description") -> Iterator[str]:
    from kfp_ddp.jobs.progress import clock

    run = description.run
    seconds = run.end and run.start and (run.end - run.start).total_seconds()
    start = f", started {run.start:%Y-%m-%d %H:%M} UTC" if run.start else ""
    yield f"{run.name}  {run.state}{f' after {clock(seconds)}' if seconds else ''}{start}"
    if run.id:
        yield f"  id          {run.id}"
    if run.page:
        yield f"  page        {run.page}"
    if description.step:
        yield f"  step        {description.step}"
    if description.cause:
        yield f"  cause       {description.cause}"
    for pod, reason in description.waiting():
        yield f"  waiting     {pod}: {reason}"
    for one in description.trainings:
        training = one.document()
        if one.settings or one.checkpoint is not None:  # else it was only evaluated
            checkpoint = "none" if one.checkpoint is None else f"step {one.checkpoint}"
            progress = training["progress"] or "no step yet"
            yield f"  checkpoint  {checkpoint} of {one.task}; {progress}"
        if training["verdict"]:
            yield f"  gate        {training['verdict']}"
        if training["bundle"]:
            yield f"  bundle      {training['bundle']}{' (champion)' * training['champion']}"
    for event in description.events[-EVENTS:]:
        times = f" ({event.times} times)" if event.times > 1 else ""
        yield f"  event       {event.object}: {event.reason}: {event.message}{times}"
    for note in description.notes:
        yield f"  note        {note}"
    for line, purpose in description.next():
        yield f"  next        {line}   # {purpose}"
