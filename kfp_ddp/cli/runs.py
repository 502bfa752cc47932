"""`kfp-ddp runs`, `status`, `logs`, `describe`, `cancel` and `retry`: runs and their steps."""

from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import echo, echo_json, served, show, text_option, with_client
from kfp_ddp.core.text import printable

if TYPE_CHECKING:
    from kfp_ddp.client.api import Client


@click.command("runs")
@text_option("--experiment", help="Only runs of this experiment.")
@text_option("--state", help="Only runs in this state, such as failed or running.")
@click.option("--most", type=click.IntRange(1), default=20, help="Maximum number of runs.")
@click.option(
    "--local",
    is_flag=True,
    help="Runs with --local in folders of this one; also listed where no cluster is configured.",
)
@served
def runs(
    client: "Client", experiment: str, state: str, most: int, local: bool, as_json: bool
) -> None:
    """List the runs, the newest first. Other commands accept the start of an id, or the folder.

    kfp-ddp runs --state failed
    """
    rows = [run.info for run in client.runs(most, experiment, state, local)]
    if as_json:
        echo_json([run.document() for run in rows])
        return
    if not rows:
        echo("no runs", err=True)
        return
    from rich.table import Column, Table
    from rich.text import Text

    from kfp_ddp.client.run.follow import MARKS, console, duration

    # What other commands take is not cut.
    identity = Column("run", min_width=8, overflow="fold")
    outcome = rows[0].outcome()
    table = Table("", identity, *outcome, "state", "started", "duration", box=None, pad_edge=False)
    for run in rows:
        mark, colour, _ = MARKS.get(run.state, MARKS["RUNNING"])
        table.add_row(
            f"[{colour}]{mark}[/]",
            Text(printable(run.word)),
            *[Text(printable(text)) for text in run.outcome().values()],
            run.state.lower(),
            f"{run.start.astimezone():%Y-%m-%d %H:%M}" if run.start else "",
            duration(run.start, run.end),
        )
    console().print(table)


@click.command("status")
@click.argument("run")
@click.option(*("--follow", "--watch", "watch"), is_flag=True, help="Show its steps until it ends.")
@served
def status(client: "Client", run: str, watch: bool, as_json: bool) -> None:
    """Show the steps of RUN and the progress of its training.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. The exit
    code is 1 if the run failed, and 143 if it was cancelled.

    kfp-ddp status last --follow
    """
    from kfp_ddp.client.kfp.steps import OVER, documents
    from kfp_ddp.client.run.follow import check_success, console, tree, until_over, watched

    finder = client.finder
    info = client.get_run(run).info
    if watch:
        info = until_over(finder, info, to_stderr=as_json)
    _, progress = watched(finder, info)
    if as_json:
        echo_json({**info.document(), "steps": documents(info.steps, progress)})
    elif not watch:
        console().print(tree(info, progress))
        if info.folder is None:
            echo(info.page or info.id)
    if watch or info.state in OVER:
        check_success(info)


@click.command("cancel")
@click.argument("run")
@click.option("--wait", is_flag=True, help="Wait until it is over.")
@served
def cancel(client: "Client", run: str, wait: bool, as_json: bool) -> None:
    """Cancel RUN: its job is deleted, its checkpoints remain, and `retry` resumes from them.

    RUN is an id or the start of one, a name, or last.
    """
    from kfp_ddp.client.run.follow import until_over

    info = client.get_run(run).cancel().info
    echo(f"cancelling {info.name}", err=as_json)
    if wait:
        info = until_over(client.finder, info, silent=True)
        echo("it is over", err=as_json)
    if as_json:
        echo_json(info.document())


@click.command("retry")
@click.argument("run")
@click.option(
    "--follow", is_flag=True, help="Show its steps until it ends; exit code 1 if it failed again."
)
@served
def retry(client: "Client", run: str, follow: bool, as_json: bool) -> None:
    """Resume RUN, which failed or was cancelled, without repeating completed steps.

    A training resumes from its newest checkpoint. KFP does not repeat an exit handler, so the
    teardown of the next run cleans up after this one.

    RUN is an id or the start of one, a name, or last.
    """
    from kfp_ddp.client.run.follow import check_success, until_over

    info = client.get_run(run).retry().info
    echo(f"{info.name} resumes: {info.page or info.id}", err=as_json)
    if follow:
        info = until_over(client.finder, info, to_stderr=as_json)
    if as_json:
        echo_json(info.document())
    if follow:
        check_success(info)


@click.command("describe")
@click.argument("run")
@click.option(
    "--files/--no-files",
    default=True,
    help="Read the run's files for its newest checkpoint; on a PVC this starts a pod.",
)
@served
def describe(run: str, files: bool, as_json: bool, client: "Client") -> None:
    """Show how RUN ended, why, and what to do next.

    The output has the failed step and its cause in one line, warnings of its pods, the newest
    checkpoint of each training, and the next command. Without a
    kubeconfig, log and files are read through KFP; what cannot be read is left out with a note.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local.

    kfp-ddp describe last
    """
    description = client.get_run(run).describe(files)
    show(as_json, description.document(), *description.lines())


@click.command("logs")
@click.argument("run")
@click.argument("step", default="")
@click.option("--follow", "-f", is_flag=True, help="Follow the logs until the steps are over.")
@click.option("--all", "every", is_flag=True, help="Also print the lines of KFP and Argo.")
@with_client
def logs(run: str, step: str, follow: bool, every: bool, client: "Client") -> None:
    """Print the logs of the steps of RUN, or of STEP.

    RUN is an id or the start of one, a name, `last`, or the folder of a run with --local. STEP is
    a step's name, such as train, whose log contains those of all its ranks; a group of steps,
    such as training; or a step of a loop with its number, such as 0/train. With several steps,
    each line starts with the step's name. The lines of KFP and Argo are left out. If the pods
    cannot be read or were deleted, the logs are read through KFP.

    kfp-ddp logs last train -f
    """
    for line in client.get_run(run).logs(step, follow, every):
        print(line, flush=follow)
