"""`kfp-ddp logs`: what a run's steps wrote."""

from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import connected

if TYPE_CHECKING:
    from kfp_ddp.core.config import Connection


@click.command("logs")
@click.argument("run")
@click.argument("step", default="")
@click.option("--follow", "-f", is_flag=True, help="Go on until the steps are over.")
@connected
def command(run: str, step: str, follow: bool, connection: "Connection") -> None:
    """Print what the steps of RUN wrote, or what STEP alone did.

    RUN is its id or the first characters of it, its name, `last`, or the folder of a run with
    --local. STEP is a step's name, such as train, whose log holds those of all its ranks; a group
    of steps, such as training; or one of a loop by its number, as in 0/train. Of several steps
    each line bears the name. What KFP's executor says of itself is left out. Where a pod is gone,
    the log that KFP keeps is read, if the pipeline root is gs:// or s3://.

    kfp-ddp logs last train -f
    """
    from kfp_ddp.client.inspection import logs as logs_of
    from kfp_ddp.client.inspection import subjects

    with subjects(connection) as known:
        subject = known.find(run)
        wanted = logs_of.chosen(subject, step)
        if follow and subject.folder is None:
            prefix = len(wanted) > 1
            try:
                logs_of.follow(subject, step, known.api(), lambda: known.find(subject.id), prefix)
            except KeyboardInterrupt:
                raise SystemExit(130) from None
        else:
            logs_of.printed(subject, step, known.api)
