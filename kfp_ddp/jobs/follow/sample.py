"""Which logs of a large job are followed: of rank 0, of one pod a node, and of those that fail.

A log that is followed is a connection to the API server and one from it to a node, for days; of a
thousand ranks that do the same, one tells what the others do, until one fails.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kfp_ddp.jobs.follow.pods import ended_at, has_failed, has_started
from kfp_ddp.jobs.specification.kinds import V1_INDEX, V1_TYPE, V2_INDEX, pod_title
from kfp_ddp.k8s.api import Object

ALL = 16
"""The most pods of a job of which every log is followed."""
STREAMS, FOR_FAILED = 16, 4
"""Logs that are open at once, and how many of these are left to pods that fail."""
FAILED = 16
"""Pods that failed whose logs are read: the first ones."""
LEADING = ("launcher", "master", "chief")


class Wanted(NamedTuple):
    """A log that is to be followed."""

    uid: str
    container: str
    end_only: bool
    """Whether the last lines are enough of what was written before."""


def sample(
    pods: Mapping[str, Object], containers: Sequence[str], begun: Mapping[str, bool]
) -> list[Wanted]:
    """The logs to begin with now.

    Args:
        pods: Those that are there, by uid.
        containers: Names of those that have a log of ours.
        begun: The logs that were begun with, by the uid of their pod, and whether they are open.
    """
    found: list[Wanted] = []
    room = STREAMS - sum(begun.values())
    failed = sorted((uid for uid in pods if has_failed(pods[uid])), key=lambda u: ended_at(pods[u]))
    for uid in failed[:FAILED]:
        if uid not in begun and len(found) < room:
            found += [Wanted(uid, each, True) for each in _started(pods[uid], containers)]
    if room - len(found) <= 0:
        return found
    nodes = {_node(pods[uid]) for uid in begun if uid in pods}
    for uid in sorted(set(pods) - set(begun), key=lambda each: place(pods[each])):
        pod = pods[uid]
        leads = place(pod)[1] == 0
        if room - len(found) <= (0 if leads else FOR_FAILED):
            break
        if has_failed(pod) or (_node(pod) in nodes and not leads):
            continue
        if started := _started(pod, containers):
            nodes.add(_node(pod))
            found += [Wanted(uid, each, not leads) for each in started]
    return found


def in_words(pods: int, namespace: str) -> str:
    """What is followed of a job of so many pods, in a line."""
    return (
        f"following at most {STREAMS - FOR_FAILED} of {pods:,} logs: of rank 0's pod and of one on "
        f"each node; of the first {FAILED} pods that fail the end is shown; "
        f"`kubectl logs -n {namespace} POD` shows any other"
    )


def place(pod: Object) -> tuple[bool, int, str]:
    """Where a pod stands among those of its job; rank 0 is in that of number 0."""
    labels = pod["metadata"].get("labels") or {}
    number = str(labels.get(V1_INDEX, labels.get(V2_INDEX, "")))
    leads = labels.get(V1_TYPE) in LEADING
    return not leads, int(number) if number.isdecimal() else sys.maxsize, pod_title(pod)


def _started(pod: Object, containers: Sequence[str]) -> list[str]:
    return [each for each in containers if has_started(pod, each)]


def _node(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")
