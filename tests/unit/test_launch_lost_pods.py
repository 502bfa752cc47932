"""A pod that was removed while it ran tells nothing, and its job is tried again all the same."""

from dataclasses import replace
from typing import Any

import pytest

from kfp_ddp.jobs.failure import root_cause
from kfp_ddp.jobs.follow.decisions import (
    SETTLE_SECONDS,
    Limits,
    Look,
    Pods,
    Verdict,
    restarted_in_place,
    split_by_a_replacement,
    verdict,
)
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import State
from tests import cluster
from tests.cluster import MADE, RUNS, ended

JOB: dict[str, Any] = {"metadata": {"name": "train-0", "uid": "job", "creationTimestamp": MADE}}
QUEUED = {**JOB, "spec": {"suspend": True}}
RESUMED = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"}
LET_IN_AGAIN = {**JOB, "status": {"conditions": [RESUMED]}}


def pod(name: str, code: int | None = None, message: str = "", **more: Any) -> dict[str, Any]:
    """Return a pod, running or ended with an exit code."""
    state = RUNS if code is None else ended(code, message)
    return cluster.pod(f"train-0-{name}", state, **{"uid": name, **more})


CLOSED = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"


@pytest.mark.parametrize("peer", [pod("master-0"), pod("master-0", 1, CLOSED)])
def test_a_lost_pod_is_the_cause_alone_and_of_a_closed_connection(peer: dict[str, Any]) -> None:
    failure = root_cause([peer], "1 Worker replica(s) failed.", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.error.endswith("its pod was removed while it ran")


def test_a_lost_pod_hides_no_error_of_the_user() -> None:
    failure = root_cause([pod("master-0", 2, "ValueError: no")], "", lost=[pod("worker-0")])
    assert not failure.retryable
    assert "ValueError: no" in failure.error


def looked(*looks: Any, job: Any = JOB, removed: Any = ()) -> Pods:
    """What is known after looks at the pods that were there, a second apart."""
    pods = Pods.of_new(JOB, KINDS["trainjob"])
    gone = {item["metadata"]["uid"]: item for item in removed}
    for clock, present in enumerate(looks, start=1):
        pods = pods.look(job, {item["metadata"]["uid"]: item for item in present}, gone, clock)
    return pods


def test_a_failed_and_removed_pod_shows_the_cause() -> None:
    """The last state of a pod comes with the event of its deletion, and is all there is of it."""
    running, peer = pod("worker-0"), pod("master-0")
    failed = pod("worker-0", 2, "ValueError: no", phase="Failed")
    pods = looked([running, peer], [peer], removed=[failed])

    assert pods.lost == ()
    assert pods.ended_for_good == [failed]
    assert "ValueError: no" in root_cause([peer, *pods.ended_for_good], "").error


def test_a_replaced_pod_is_not_part_of_the_end() -> None:
    failed = pod("worker-0", 143, "stopped", phase="Failed")
    pods = looked([failed], [pod("worker-0", uid="another")])

    assert pods.ended == (failed,)
    assert pods.ended_for_good == []


def test_a_pod_that_is_gone_was_lost_where_it_ran_and_ended_where_it_had() -> None:
    for phase, lost in (("Running", 1), ("Unknown", 1), ("Succeeded", 0), ("Pending", 0)):
        pods = looked([pod("worker-0", phase=phase), pod("master-0")], [pod("master-0")])
        assert (len(pods.lost), len(pods.ended)) == (lost, 1 - lost)


def seen(*looks: Any, clock: float = 9999, heard_at: float = 0) -> Look:
    """The last of these looks at the pods of a job."""
    return Look(KINDS["trainjob"], JOB, looked(*looks), True, now=0, clock=clock, heard_at=heard_at)


AGAIN = pod("node-0")
AGAIN["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1}}
REPLACED = ([pod("worker-0"), pod("master-0")], [pod("worker-0", uid="another"), pod("master-0")])


@pytest.mark.parametrize(
    ("clock", "heard_at", "silence", "split"),
    [
        (2, 0, 60, False),
        (62, 0, 60, False),
        (63, 0, 60, True),
        (63, 63, 60, False),
        (124, 63, 60, True),
        (9999, 0, 0, False),
    ],
)
def test_a_job_with_a_replaced_pod_is_over_after_some_silence(
    clock: float, heard_at: float, silence: float, split: bool
) -> None:
    look = seen(*REPLACED, clock=clock, heard_at=heard_at)
    assert look.pods.replaced_at == 2
    assert bool(split_by_a_replacement(look, Limits(silence=silence))) is split


def test_a_job_that_cannot_recover_is_given_up() -> None:
    """Neither an answer nor an end would come from its ranks for a quarter of an hour."""
    restarted, split = seen([pod("node-0")], [AGAIN]), seen(*REPLACED)
    limits = Limits(silence=60)
    why = "a container was restarted in its pod"
    assert verdict(restarted, limits) == Verdict(State("failed", why), True)
    assert verdict(replace(restarted, kind=KINDS["pytorchjob"]), limits) is None
    why = "a lost pod was replaced, and its peers wait for it"
    assert verdict(split, limits) == Verdict(State("failed", why), True)
    assert verdict(split, Limits()) is None


def test_a_job_waits_for_the_replacement_of_a_lost_pod() -> None:
    look = seen(REPLACED[0], [pod("master-0")])
    assert not split_by_a_replacement(look, Limits(silence=60))


def test_a_replacement_counts_for_a_pod_that_failed_and_for_none_that_succeeded() -> None:
    for code, phase, replaced in ((1, "Failed", True), (0, "Succeeded", False)):
        before, after = pod("worker-0", code, phase=phase), pod("worker-0", uid="another")
        assert looked([before], [after]).replaced is replaced


@pytest.mark.parametrize(
    ("kind", "after", "restarted"),
    [
        ("trainjob", SETTLE_SECONDS + 0.1, True),
        ("trainjob", SETTLE_SECONDS - 0.1, False),
        ("pytorchjob", 9999, False),
    ],
)
def test_a_container_restarted_ends_the_job(kind: str, after: float, restarted: bool) -> None:
    """The pods that failed with it are waited for a moment."""
    look = seen([pod("node-0")], [AGAIN], [AGAIN], clock=2 + after)
    assert look.pods.restarted_at == 2
    assert bool(restarted_in_place(replace(look, kind=KINDS[kind]))) is restarted


def test_pods_that_a_queue_took_back_are_no_failure() -> None:
    """Neither lost nor replaced, and nothing that was lost before counts once it is let in."""
    worker, master = pod("worker-0"), pod("master-0")
    pods = looked([worker, master])
    stopped = {"worker-0": pod("worker-0", 143)}
    pods = pods.look(QUEUED, {"worker-0": worker, "master-0": master}, {}, 2)
    pods = pods.look(JOB, stopped, {}, 3)
    assert pods.own == []
    assert pods.only_preempted
    successor = pod("master-0", uid="another")
    pods = pods.look(JOB, {"another": successor}, {}, 4)

    assert (pods.lost, pods.ended) == ((), ())
    assert pods.own == [successor]
    assert not pods.only_preempted
    assert pods.replaced_at == 0
    again = pods.look(JOB, {"another": successor}, {}, 5)
    assert again.own == [successor], "it was taken back once"
    assert again.look(JOB, {}, {}, 6).look(JOB, {}, {}, 7).lost == (successor,)


def test_a_failed_pod_beside_preempted_ones_is_a_failure() -> None:
    pods = looked([pod("worker-0")]).look(QUEUED, {"worker-0": pod("worker-0")}, {}, 2)
    present = {"worker-0": pod("worker-0", 143), "another": pod("worker-0", 1, uid="another")}
    assert not pods.look(JOB, present, {}, 3).only_preempted


def test_a_pod_lost_before_the_queue_took_the_job_back_is_forgotten() -> None:
    pods = looked([pod("worker-0"), pod("master-0")], [pod("master-0")])
    assert len(pods.lost) == 1
    pods = pods.look(LET_IN_AGAIN, {"master-0": pod("master-0")}, {}, 3)
    assert pods.lost == ()
    assert pods.preempted == {"master-0"}
