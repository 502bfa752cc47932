"""How far the ranks are, by what each tells in its file, and whether they stand still; pure.

Heartbeats may come from ranks that wait for one another for ever. What counts is that a step, or
the phase around it, changes; by the monotonic clock of this process alone.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.failure import Failure
from kfp_ddp.core.files import read_below
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.k8s.api import Object

LONGEST_BYTES = 4096
PART = 64
"""Files that are read at once: those of a thousand ranks take seconds on a claim."""
# A rank that lives writes each 10 s, be it that it waits for others; NFS shows it a minute later.
SILENT_SECONDS = 120.0
# Reading a dataset, an evaluation or a checkpoint has no steps of its own, and takes its time.
LONG_PHASES, LONGER = ("start", "evaluate", "save"), 4
BEHIND = ("start", "data")
"""Phases in which a rank has not begun with the step that others wait in."""


class Told(NamedTuple):
    """What a rank told last."""

    rank: int
    pod: str
    node: str
    step: int
    phase: str
    time: float


class Seen(NamedTuple):
    """What a rank told, and since when it tells that and writes no more."""

    told: Told
    advanced_at: float
    written_at: float


class Stall(NamedTuple):
    """Ranks that stand still: what is told of it, and the node that is at fault, '' for none."""

    failure: Failure
    node: str


def read(folder: Path) -> Iterator[tuple[list[Told], bool]]:
    """What the files in a folder tell, in parts, and whether each is the last.

    Other work may be done between. Whoever may write there, a file that tells nothing is none.
    """
    unread = (OSError, ValueError, TypeError, KeyError, RecursionError)
    names = sorted(path.name for path in folder.glob("*.json"))
    for at in range(0, max(1, len(names)), PART):
        found = []
        for name in names[at : at + PART]:
            with contextlib.suppress(*unread):
                found.append(_parsed(json.loads(read_below(folder, name, LONGEST_BYTES))))
        yield found, at + PART >= len(names)


def _parsed(said: Mapping[str, object]) -> Told:
    rank, step, time = (said[name] for name in ("rank", "step", "time"))
    if not isinstance(rank, int) or not isinstance(step, int) or not isinstance(time, int | float):
        raise TypeError("a rank, a step or a time is no number")
    pod, node, phase = (str(said[name])[:253] for name in ("pod", "node", "phase"))
    if not f"{pod}{node}{phase}".isprintable():
        raise ValueError("a name that cannot be printed")
    return Told(rank, pod, node, step, phase, time)


@dataclass(frozen=True)
class Ranks:
    """The ranks that were seen so far; each look makes new ones of the last."""

    seen: Mapping[int, Seen] = field(default_factory=dict)
    earlier: Mapping[int, Told] | None = None
    """What lay there at the first look, which an earlier attempt may have written."""

    def look(self, told: list[Told], pods: Mapping[str, Object], clock: float) -> "Ranks":
        """What is known after one more look; `pods` are the job's own, by name."""
        earlier = {each.rank: each for each in told} if self.earlier is None else self.earlier
        seen = {}
        for each in told:
            if each.pod not in pods and earlier.get(each.rank) == each:
                continue
            before = self.seen.get(each.rank)
            if before is None or (before.told.step, before.told.phase) != (each.step, each.phase):
                seen[each.rank] = Seen(each, clock, clock)
            elif before.told.time != each.time:
                seen[each.rank] = Seen(each, before.advanced_at, clock)
            else:
                seen[each.rank] = before
        return Ranks(seen, earlier)

    def stall(
        self, pods: Mapping[str, Object], since: float, clock: float, limit: float
    ) -> Stall | None:
        """Who stands still, if all have for so long; None while one goes on.

        Args:
            pods: The job's own, by name.
            since: Monotonic clock since when all pods have run.
            clock: The monotonic clock now.
            limit: How long no rank may advance, in seconds; 0 for ever.
        """
        ranks = list(self.seen.values())
        if not limit or not ranks:
            return None
        quiet = min(SILENT_SECONDS, limit / 2)
        still = clock - max(since, *(each.advanced_at for each in ranks))
        silent = [each for each in ranks if clock - each.written_at > quiet]
        if not silent and any(each.told.phase in LONG_PHASES for each in ranks):
            limit *= LONGER
        if still < limit:
            return None
        who = silent or _behind(ranks)
        nodes = {_node(each.told, pods) for each in who}
        alone = len(who) < len(ranks) and len(nodes) == 1
        line = f"no rank has advanced for {still / 60:.1f} minutes"
        if len(who) < len(ranks):
            first = min(who, key=lambda each: each.told.rank).told
            others = f" and {len(who) - 1} more" if len(who) > 1 else ""
            line += f": {_named(first, pods)}{others} {'is silent' if silent else 'is behind'}"
            line += f" at step {first.step} ({first.phase})"
        else:
            line += f": all {len(ranks)} ranks stand at step {ranks[0].told.step}"
        return Stall(Failure(1, -1, line, retryable=True), nodes.pop() if alone else "")


def _behind(ranks: list[Seen]) -> list[Seen]:
    """The ranks that the others wait for."""

    def place(each: Seen) -> tuple[int, bool]:
        return each.told.step, each.told.phase not in BEHIND

    least = min(map(place, ranks))
    return [each for each in ranks if place(each) == least]


def _node(told: Told, pods: Mapping[str, Object]) -> str:
    """The node of a rank: as its pod has it, or as it says itself."""
    return str(pods.get(told.pod, {}).get("spec", {}).get("nodeName") or told.node)


def _named(told: Told, pods: Mapping[str, Object]) -> str:
    title = pod_title(pods[told.pod]) if told.pod in pods else told.pod
    node = _node(told, pods)
    return f"rank {told.rank} ({title}{f' on node {node}' if node else ''})"
