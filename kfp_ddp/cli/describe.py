"""`kfp-ddp describe`: why a run failed, or waits, and what to do next."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, connected, echo_json

if TYPE_CHECKING:
    from kfp_ddp.client.inspection.description import Description
    from kfp_ddp.core.config import Connection

EVENTS = 8
"""That are shown; --json has all."""


@click.command("describe")
@click.argument("run")
@click.option(
    "--files/--no-files",
    default=True,
    help="Look at the run's files for its newest checkpoint, through a pod where they lie on a "
    "claim.",
)
@AS_JSON
@connected
def command(run: str, files: bool, as_json: bool, connection: "Connection") -> None:
    """Tell what RUN came to, why, and what to do next.

    That is the step that failed and its cause in one line, warnings of its pods, the newest
    checkpoint of each training, and the next command.

    RUN is its id or the first characters of it, its name, `last`, or the folder of a run with
    --local. What cannot be looked at, such as pods without a kubeconfig, is said and left out.

    kfp-ddp describe last
    """
    from kfp_ddp.client.inspection import subjects
    from kfp_ddp.client.inspection.description import describe
    from kfp_ddp.core.text import printable

    with subjects(connection) as known:
        found = describe(known.find(run), known.api, files)
    if as_json:
        echo_json(found.document())
        return
    for line in told(found):
        click.echo(printable(line))


def told(found: "Description") -> Iterator[str]:
    """The description for people, line by line."""
    from kfp_ddp.jobs.progress import clock

    subject = found.subject
    took = subject.end and subject.start and (subject.end - subject.start).total_seconds()
    began = f", began {subject.start:%Y-%m-%d %H:%M} UTC" if subject.start else ""
    yield f"{subject.name}  {subject.state}{f' after {clock(took)}' if took else ''}{began}"
    if subject.id:
        yield f"  id          {subject.id}"
    if subject.page:
        yield f"  page        {subject.page}"
    if found.step:
        yield f"  step        {found.step}"
    if found.cause:
        yield f"  cause       {found.cause}"
    for pod, reason in found.waiting:
        yield f"  waits       {pod}: {reason}"
    for each in found.reached:
        checkpoint = "none" if each.checkpoint is None else f"step {each.checkpoint}"
        yield f"  checkpoint  {checkpoint} of {each.task}; {each.progress or 'no step yet'}"
        if each.verdict:
            yield f"  gate        {each.verdict}"
        if each.bundle:
            yield f"  bundle      {each.bundle}{', the champion now' if each.champion else ''}"
    for event in found.events[-EVENTS:]:
        times = f" ({event.times} times)" if event.times > 1 else ""
        yield f"  event       {event.object}: {event.reason}: {event.message}{times}"
    for note in found.notes:
        yield f"  note        {note}"
    for line, use in found.next:
        yield f"  next        {line}   # {use}"
