"""The progress of the ranks, a change of step or phase in their files, and whether they stall."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kfp_ddp.core.failure import Failure
from kfp_ddp.core.files import read_below
from kfp_ddp.jobs.follow.decisions import Snapshot, Verdict
from kfp_ddp.jobs.kinds import pod_title
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import is_pending

LONGEST_BYTES = 4096
ROUND_SECONDS = 5.0
PART_SECONDS = 0.5
PART = 64
"""Files read at once: the files of a thousand ranks take seconds on a PVC."""
# A live rank writes every 10 s, also while it waits for others; NFS shows it a minute later.
SILENT_SECONDS = 120.0
# Reading a dataset, an evaluation and a checkpoint have no steps, and may take long.
LONG_PHASES = ("start", "evaluate", "save")
LONGER = 4
BEHIND = ("start", "data")
"""Phases of a rank that has not begun the step in which others wait."""


class RankReport(NamedTuple):
    """The last report of a rank."""

    rank: int
    pod: str
    node: str
    step: int
    phase: str
    time: float

    @property
    def position(self) -> tuple[int, bool]:
        """The step, and whether the rank has begun it."""
        return self.step, self.phase not in BEHIND


class RankState(NamedTuple):
    """A rank's report, when its step or phase last changed, and when it was last written."""

    report: RankReport
    advanced_at: float
    written_at: float

    def after(self, report: RankReport, clock: float) -> "RankState":
        """Return the state after one more report, which may be the same."""
        old = self.report
        advanced = (report.step, report.phase) != (old.step, old.phase)
        written = advanced or report.time != old.time
        return RankState(
            report,
            advanced_at=clock if advanced else self.advanced_at,
            written_at=clock if written else self.written_at,
        )


def read(folder: Path, names: Iterable[str]) -> list[RankReport]:
    """Return the reports in these files, where the ranks' user may write anything else."""
    reports = []
    for name in names:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            reports.append(_parse(json.loads(read_below(folder, name, LONGEST_BYTES))))
    return reports


def _parse(fields: Mapping[str, object]) -> RankReport:
    rank, step, time = (fields[name] for name in ("rank", "step", "time"))
    if not isinstance(rank, int) or not isinstance(step, int):
        raise TypeError("rank and step must be whole numbers")
    if not isinstance(time, int | float):
        raise TypeError("time must be a number")
    pod, node, phase = (str(fields[name])[:253] for name in ("pod", "node", "phase"))
    if not f"{pod}{node}{phase}".isprintable():
        raise ValueError("a name is not printable")
    return RankReport(rank, pod, node, step, phase, time)


@dataclass(frozen=True)
class Ranks:
    """The states of the ranks; each look returns new ones."""

    states: Mapping[int, RankState] = field(default_factory=dict)
    earlier: Mapping[int, RankReport] | None = None
    """The reports at the first look, which an earlier attempt may have written."""

    def look(self, reports: list[RankReport], pods: Mapping[str, Object], clock: float) -> "Ranks":
        """Return the states after new reports; `pods` are the job's current ones by name."""
        first = {report.rank: report for report in reports}
        earlier = first if self.earlier is None else self.earlier
        states = {}
        for report in reports:
            # A file that nobody wrote since the first look is of an earlier attempt.
            if report.pod not in pods and earlier.get(report.rank) == report:
                continue
            before = self.states.get(report.rank) or RankState(report, clock, clock)
            states[report.rank] = before.after(report, clock)
        return Ranks(states, earlier)

    def stall(
        self, pods: Mapping[str, Object], since: float, clock: float, limit: float
    ) -> Verdict | None:
        """Return the stall, and a node alone at fault; None if a rank advanced in `limit`."""
        ranks = list(self.states.values())
        if not limit or not ranks:
            return None
        stalled = clock - max(since, *(rank.advanced_at for rank in ranks))
        quiet = min(SILENT_SECONDS, limit / 2)
        silent = [rank.report for rank in ranks if clock - rank.written_at > quiet]
        in_long_phase = any(rank.report.phase in LONG_PHASES for rank in ranks)
        if in_long_phase and not silent:
            limit *= LONGER
        if stalled < limit:
            return None
        culprits = silent or _last_ones([rank.report for rank in ranks])
        line = f"no rank has advanced for {stalled / 60:.1f} minutes: "
        node = ""
        if len(culprits) < len(ranks):
            line += _blame(culprits, "is silent" if silent else "is behind", pods)
            node = _common_node(culprits, pods)
        else:
            line += f"all {len(ranks)} ranks are at step {ranks[0].report.step}"
        failure = Failure(1, -1, line, retryable=True)
        return Verdict(State("failed", line), given_up=True, failure=failure, node=node)


def _last_ones(reports: list[RankReport]) -> list[RankReport]:
    """Return the reports of the ranks that are furthest behind."""
    last = min(report.position for report in reports)
    return [report for report in reports if report.position == last]


def _blame(culprits: list[RankReport], fault: str, pods: Mapping[str, Object]) -> str:
    """Return which ranks hold up the others, and where the first of them is."""
    first = min(culprits, key=lambda report: report.rank)
    who = _named(first, pods)
    if len(culprits) > 1:
        who += f" and {len(culprits) - 1} more"
    return f"{who} {fault} at step {first.step} ({first.phase})"


def _common_node(culprits: list[RankReport], pods: Mapping[str, Object]) -> str:
    """Return the node of all these ranks; '' if they are on several."""
    nodes = {_node(report, pods) for report in culprits}
    return nodes.pop() if len(nodes) == 1 else ""


def _node(report: RankReport, pods: Mapping[str, Object]) -> str:
    """Return the node of a rank, by its pod or else by its report."""
    return str(pods.get(report.pod, {}).get("spec", {}).get("nodeName") or report.node)


def _named(report: RankReport, pods: Mapping[str, Object]) -> str:
    title = pod_title(pods[report.pod]) if report.pod in pods else report.pod
    node = _node(report, pods)
    place = f"{title} on node {node}" if node else title
    return f"rank {report.rank} ({place})"


class StallWatch:
    """Reads the reports of the ranks now and then, and finds a stall."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = Ranks()
        self.unread: list[str] | None = None
        """The files that remain of the current round over all reports; None between two rounds."""
        self.reports: list[RankReport] = []
        self.began_at = self.read_at = -ROUND_SECONDS
        self.uids: frozenset[str] = frozenset()
        self.since = 0.0
        """Monotonic clock since when all of the present pods have run."""

    def look(self, snapshot: Snapshot, limit: float) -> Verdict | None:
        """Return the stall if no rank has advanced for `limit` seconds."""
        uids = frozenset(pod["metadata"]["uid"] for pod in snapshot.pods.own)
        waits = snapshot.state.phase != "running" or any(map(is_pending, snapshot.pods.own))
        if uids != self.uids or waits:
            self.uids = uids
            self.since = snapshot.clock
        if not limit or not self._read(snapshot.clock):
            return None
        pods = {pod["metadata"]["name"]: pod for pod in snapshot.pods.own}
        self.ranks = self.ranks.look(self.reports, pods, snapshot.clock)
        return self.ranks.stall(pods, self.since, snapshot.clock, limit)

    def _read(self, clock: float) -> bool:
        """Read the next part of the files if it is due; return whether it was the last."""
        if self.unread is None and clock - self.began_at >= ROUND_SECONDS:
            self.unread = sorted(path.name for path in self.folder.glob("*.json"))
            self.reports = []
            self.began_at = clock
        if self.unread is None or clock - self.read_at < PART_SECONDS:
            return False
        self.read_at = clock
        self.reports += read(self.folder, self.unread[:PART])
        self.unread = self.unread[PART:] or None
        return self.unread is None
