"""A run that is followed until its end: its steps as a tree, and how far its training is."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from kfp_ddp.client.progress import Progress
from kfp_ddp.client.runs import ended, spec_of, started
from kfp_ddp.client.steps import OVER, Step, leaves, steps_of
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import JobError, ServerError
from kfp_ddp.jobs.progress import clock

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Run
    from rich.tree import Tree

POLL_SECONDS = 2.0
SILENCE_SECONDS = 300.0
"""How long the server may not answer while a run is followed."""
MARKS = {
    "SUCCEEDED": ("✓", "green"),
    "CACHED": ("✓", "green"),
    "FAILED": ("✗", "red"),
    "CANCELED": ("✗", "red"),
    "RUNNING": ("●", "cyan"),
    "PENDING": ("·", "dim"),
    "SKIPPED": ("–", "dim"),
    "OMITTED": ("–", "dim"),
}
"""A mark and a colour for each state."""
WORDS = {
    "PENDING": "waits",
    "RUNNING": "runs",
    "SUCCEEDED": "",
    "CACHED": "from the cache",
    "FAILED": "failed",
    "CANCELED": "cancelled",
    "SKIPPED": "its condition did not hold",
    "OMITTED": "not run",
}

GOING = ("RUNNING", "PENDING")


class Teller(Protocol):
    """What shows a run to a person each time that it is looked at."""

    def tell(self, run: "V2beta1Run", steps: Sequence[Step]) -> None:
        """Show what is new."""


def wait(seconds: float) -> None:
    """Let time pass between two looks."""
    time.sleep(seconds)


def follow(client: "kfp.Client", run_id: str, teller: Teller) -> "V2beta1Run":
    """Show a run until it is over, and return it.

    Raises:
        ServerError: the server has not answered for minutes; the run may go on.
        RefusedError: the server refuses to tell of it.
    """
    spec, silent_since = None, 0.0
    while True:
        try:
            run = client.get_run(run_id)
            spec = spec or spec_of(client, run)
            silent_since = 0.0
        except ServerError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > SILENCE_SECONDS:
                raise
            wait(POLL_SECONDS)
            continue
        teller.tell(run, steps_of(run, spec))
        if run.state in OVER:
            return run
        wait(POLL_SECONDS)


def until_over(
    client: "kfp.Client",
    connection: Connection,
    run_id: str,
    silent: bool = False,
    aside: bool = False,
) -> "V2beta1Run":
    """Show a run until it is over: a tree on a terminal, lines elsewhere.

    Args:
        client: Of the server.
        connection: How its cluster is reached, for the progress of a training.
        run_id: The run.
        silent: Show nothing.
        aside: Show it on stderr, since stdout is for a program.

    Raises:
        SystemExit: 130 after an interrupt, with a line.
        KfpDdpError: as `follow`.
    """
    progress = Progress(connection, run_id)
    stream = sys.stderr if aside else sys.stdout
    try:
        if silent:
            return follow(client, run_id, LineTeller(lambda _: None, lambda _: ""))
        if stream.isatty():
            with TreeTeller(progress, stream) as teller:
                return follow(client, run_id, teller)
        lines = LineTeller(lambda line: print(line, file=stream, flush=True), progress)
        return follow(client, run_id, lines)
    except KeyboardInterrupt:
        print(f"the run goes on: kfp-ddp status {run_id[:8]} --follow", file=sys.stderr)
        raise SystemExit(130) from None


def check_success(run: "V2beta1Run") -> None:
    """Refuse a run that is over without success.

    Raises:
        JobError: naming what tells why.
    """
    if run.state != "SUCCEEDED":
        raise JobError(
            f"{run.display_name} ended {run.state}: kfp-ddp describe {run.run_id[:8]} tells why"
        )


class LineTeller:
    """A line for each step that changes, for a log."""

    def __init__(self, say: Callable[[str], None], progress: Callable[[Step], str]) -> None:
        self._say, self._progress = say, progress
        self._told: dict[str, str] = {}

    def tell(self, run: "V2beta1Run", steps: Sequence[Step]) -> None:
        """Print what is new."""
        for leaf in leaves(steps):
            step, place = leaf.step, leaf.title
            text = (self._progress(step) if step.state in GOING else "") or _in_words(step)
            if self._told.get(place, WORDS["PENDING"]) != text:
                self._told[place] = text
                mark = MARKS.get(step.state, MARKS["PENDING"])[0]
                self._say(f"{datetime.now():%H:%M:%S}  {mark} {place:<15} {text}".rstrip())


class TreeTeller(AbstractContextManager["TreeTeller"]):
    """A tree that is drawn anew in its place on a terminal."""

    def __init__(self, progress: Callable[[Step], str], stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._live = Live(console=Console(file=stream), auto_refresh=False)

    def __enter__(self) -> "TreeTeller":
        self._live.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        self._live.__exit__(*about)

    def tell(self, run: "V2beta1Run", steps: Sequence[Step]) -> None:
        """Draw it."""
        self._live.update(tree(run, steps, self._progress), refresh=True)


def tree(
    run: "V2beta1Run", steps: Sequence[Step], progress: Callable[[Step], str] = lambda _: ""
) -> "Tree":
    """The steps of a run, to be printed."""
    from rich.text import Text
    from rich.tree import Tree

    mark, colour = MARKS.get(run.state or "PENDING", MARKS["RUNNING"])
    head = Text.assemble(
        (f"{mark} ", colour),
        (run.display_name, "bold"),
        f"  {run.run_id[:8]}  {run.state or 'PENDING'}  {lasted(started(run), ended(run))}",
    )
    root = Tree(head, guide_style="dim")
    _grow(root, steps, progress)
    return root


def _grow(branch: "Tree", steps: Sequence[Step], progress: Callable[[Step], str]) -> None:
    from rich.text import Text

    for step in steps:
        mark, colour = MARKS.get(step.state, MARKS["PENDING"])
        said = progress(step) if step.state in GOING and not step.steps else ""
        line = Text.assemble(
            (f"{mark} ", colour), f"{step.title}  ", (said or _in_words(step), "dim")
        )
        _grow(branch.add(line), step.steps, progress)


def lasted(start: datetime | None, end: datetime | None) -> str:
    """How long something took, or takes until now; '' for what has not begun."""
    return clock(((end or datetime.now(UTC)) - start).total_seconds()) if start else ""


def _in_words(step: Step) -> str:
    said = WORDS.get(step.state, step.state.lower())
    if step.by_driver and step.state in GOING:
        said = "is prepared"
    if step.by_driver and step.state == "FAILED":
        said = "could not be prepared"
    if step.start and step.end and step.state not in ("SKIPPED", "OMITTED"):
        said = f"{said} {lasted(step.start, step.end)}".strip()
    return said
