"""Pods that were lost, and stalled jobs: what is named, and what the next attempt avoids."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.jobs.failure import cause_in_pods
from kfp_ddp.jobs.follow.decisions import (
    SETTLE_SECONDS,
    Limits,
    Pods,
    Snapshot,
    Verdict,
    restarted_in_place,
    split_by_a_replacement,
    verdict,
)
from kfp_ddp.jobs.follow.ranks import RankReport, Ranks, read
from kfp_ddp.jobs.identity import identify
from kfp_ddp.jobs.jobs import AVOIDS, Jobs, avoided
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object
from tests import cluster
from tests.cluster import MADE, RUNS, ended, worker

JOB: dict[str, Any] = {"metadata": {"name": "train-0", "uid": "job", "creationTimestamp": MADE}}
QUEUED = {**JOB, "spec": {"suspend": True}}
RESUMED = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"}
LET_IN_AGAIN = {**JOB, "status": {"conditions": [RESUMED]}}
LIMIT = 600.0


def pod(name: str, code: int | None = None, message: str = "", **more: Any) -> dict[str, Any]:
    """Return a pod, running or ended with an exit code."""
    state = RUNS if code is None else ended(code, message)
    return cluster.pod(f"train-0-{name}", state, **{"uid": name, **more})


CLOSED = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"


@pytest.mark.parametrize("peer", [pod("master-0"), pod("master-0", 1, CLOSED)])
def test_a_lost_pod_is_the_cause_alone_and_of_a_closed_connection(peer: dict[str, Any]) -> None:
    failure = cause_in_pods([peer], "1 Worker replica(s) failed.", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.error.endswith("its pod was removed while it ran")


def test_a_lost_pod_hides_no_error_of_the_user() -> None:
    failure = cause_in_pods([pod("master-0", 2, "ValueError: no")], "", lost=[pod("worker-0")])
    assert not failure.retryable
    assert "ValueError: no" in failure.error


def looked(*looks: Any, job: Any = JOB, removed: Any = ()) -> Pods:
    """What is known after looks at the pods that were there, a second apart."""
    pods = Pods(KINDS["trainjob"], started(JOB))
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
    assert "ValueError: no" in cause_in_pods([peer, *pods.ended_for_good], "").error


def test_a_replaced_pod_is_not_part_of_the_end() -> None:
    failed = pod("worker-0", 143, "stopped", phase="Failed")
    pods = looked([failed], [pod("worker-0", uid="another")])

    assert pods.ended == (failed,)
    assert pods.ended_for_good == []


def test_a_pod_that_is_gone_was_lost_where_it_ran_and_ended_where_it_had() -> None:
    for phase, lost in (("Running", 1), ("Unknown", 1), ("Succeeded", 0), ("Pending", 0)):
        pods = looked([pod("worker-0", phase=phase), pod("master-0")], [pod("master-0")])
        assert (len(pods.lost), len(pods.ended)) == (lost, 1 - lost)


def seen(*looks: Any, clock: float = 9999, heard_at: float = 0) -> Snapshot:
    """The last of these looks at the pods of a job."""
    return Snapshot(
        KINDS["trainjob"], JOB, looked(*looks), True, now=0, clock=clock, heard_at=heard_at
    )


AGAIN = pod("node-0")
AGAIN["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1}}
REPLACED = ([pod("worker-0"), pod("master-0")], [pod("worker-0", uid="another"), pod("master-0")])


@pytest.mark.parametrize(
    ("clock", "heard_at", "silence", "split"),
    [
        *((62, 0, 60, False), (63, 0, 60, True), (63, 63, 60, False), (124, 63, 60, True)),
        (9999, 0, 0, False),
    ],
)
def test_silence_ends_a_split(clock: float, heard_at: float, silence: float, split: bool) -> None:
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
    not_replaced_yet = seen(REPLACED[0], [pod("master-0")])
    assert verdict(not_replaced_yet, limits) is None


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


def pods(count: int) -> dict[str, Object]:
    created = [worker(index, spec={"nodeName": f"node-{index}"}) for index in range(count)]
    return {item["metadata"]["name"]: item for item in created}


def report(
    rank: int, step: int, phase: str = "step", time: float = 0, per_pod: int = 1
) -> RankReport:
    pod = rank // per_pod
    return RankReport(rank, f"x-worker-{pod}", f"node-{pod}", step, phase, time)


def played(
    *ranks: tuple[int, str, bool], seconds: float = LIMIT, per_pod: int = 1, since: float = 0
) -> Verdict | None:
    """Ranks that went to a step and phase at 0 s, and write on or not, for some seconds."""
    count = len(ranks)
    seen = Ranks()
    for clock in range(0, int(seconds) + 1, 10):
        present = [
            report(rank, step, phase, float(clock) if writes else 0.0, per_pod)
            for rank, (step, phase, writes) in enumerate(ranks)
        ]
        seen = seen.look(present, pods(count), clock)
    return seen.stall(pods(count), since, seconds, LIMIT)


ALIVE, SILENT = (7, "step", True), (7, "step", False)


@pytest.mark.parametrize(
    ("ranks", "per_pod", "part", "node"),
    [
        # One that was stopped writes no more.
        ([ALIVE, SILENT], 1, "rank 1 (worker-1 on node node-1) is s", "node-1"),
        # One that lives and is behind, by a step or by the data that it waits for.
        ([ALIVE, (6, "step", True)], 1, "rank 1 (worker-1 on node node-1) is b", "node-1"),
        ([(7, "data", True), ALIVE], 1, "rank 0 (worker-0 on node node-0) is b", "node-0"),
        # All ranks of one pod of two.
        ([ALIVE, ALIVE, SILENT, SILENT], 2, "rank 2 (worker-1 on node node-1) and 1 m", "node-1"),
        # Ranks on several nodes: none of these is at fault alone.
        ([ALIVE, SILENT, SILENT], 1, "rank 1 (worker-1 on node node-1) and 1 more is silent", ""),
        ([ALIVE, ALIVE], 1, "all 2 ranks are at step 7", ""),
        ([SILENT, SILENT], 1, "all 2 ranks are at step 7", ""),
    ],
)
def test_the_rank_that_others_wait_for_is_named(
    ranks: list[tuple[int, str, bool]], per_pod: int, part: str, node: str
) -> None:
    result = played(*ranks, per_pod=per_pod)
    assert result is not None
    assert part in result.state.message
    assert result.state.message.startswith("no rank has advanced for 10.0 minutes: ")
    assert result.failure is not None
    assert result.failure.retryable
    assert result.node == node
    assert played(*ranks, per_pod=per_pod, seconds=LIMIT - 10) is None
    assert played(*ranks, per_pod=per_pod, since=1) is None, "its pods have not run so long"


@pytest.mark.parametrize("phase", ["start", "evaluate", "save"])
def test_a_phase_without_steps_may_take_four_times_as_long(phase: str) -> None:
    ranks = [(7, "step", True), (7, phase, True)]
    assert played(*ranks, seconds=4 * LIMIT - 10) is None
    assert played(*ranks, seconds=4 * LIMIT) is not None
    silent = [(7, phase, True), (7, phase, False)]
    assert played(*silent) is not None, "but a rank that is stopped does nothing"


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    pauses=st.lists(st.floats(5, LIMIT - 1), min_size=20, max_size=40),
    behind=st.lists(st.integers(0, 1), max_size=3),
)
def test_no_job_in_which_a_rank_advances_is_stalled(pauses: list[float], behind: list[int]) -> None:
    seen, count, at = Ranks(), 1 + len(behind), 0.0
    for step, pause in enumerate(pauses, 1):
        at += pause
        others = [report(rank, step - late, "step", at) for rank, late in enumerate(behind, 1)]
        seen = seen.look([report(0, step, "step", at), *others], pods(count), at)
        assert seen.stall(pods(count), 0, at, LIMIT) is None
        assert seen.stall(pods(count), 0, at + LIMIT, 0) is None
        assert seen.stall(pods(count), 0, at + LIMIT + 1, LIMIT) is not None


def test_reports_of_an_earlier_attempt_are_ignored() -> None:
    left = [report(0, 7)._replace(pod="x-r0-worker-0"), report(1, 7)._replace(pod="x-r0-worker-1")]
    seen = Ranks().look(left, pods(2), 0)
    assert seen.look(left, pods(2), LIMIT).stall(pods(2), 0, LIMIT, LIMIT) is None
    host = [item._replace(time=1.0) for item in left]  # of the node's network: its name
    seen = seen.look(host, pods(2), 10)
    assert seen.stall(pods(2), 0, LIMIT, LIMIT) is None
    result = seen.look(host, pods(2), LIMIT).stall(pods(2), 0, LIMIT + 10, LIMIT)
    assert result is not None
    assert "all 2 ranks are" in result.state.message


def test_files_that_are_not_reports_are_skipped(tmp_path: Path) -> None:
    good = report(0, 7)._asdict() | {"step_seconds": 0.1}
    (tmp_path / "0.json").write_text(json.dumps(good))
    (tmp_path / "1.json").symlink_to(tmp_path / "0.json")
    (tmp_path / "2.json").mkdir()
    wrong: list[Any] = [None, "1", []]
    bad: list[Any] = [
        *("", "no json", "3", "[]", "null", "[" * 3000),
        *({**good, name: value} for name in ("rank", "step", "time") for value in wrong),
        *({**good, name: "\x1b[2J"} for name in ("pod", "node", "phase")),
        *({k: v for k, v in good.items() if k != name} for name in RankReport._fields),
        {**good, "pod": "x" * 5000},
    ]
    for number, text in enumerate(bad, 3):
        line = text if isinstance(text, str) else json.dumps(text)
        (tmp_path / f"{number}.json").write_text(line)
    names = [*sorted(path.name for path in tmp_path.iterdir()), "removed"]
    assert read(tmp_path, names) == [report(0, 7)]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_next_attempts_prefer_other_nodes(kind: str) -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    needs = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    affinity: dict[str, Any] = {"nodeAffinity": needs, "podAffinity": {}}
    spec = LaunchSpec.create(kind=kind, image="a:1", command=["x"], affinity=affinity)
    api: Any = SimpleNamespace(namespace="space")
    jobs = Jobs(api, spec, identify("run", "train", "", spec), None)
    jobs.__dict__["runtime"] = None
    plain = jobs.manifest(0)
    assert avoided({0: plain}) == frozenset()
    jobs.avoided = frozenset({"b", "a"})
    created = jobs.manifest(1)
    assert created["metadata"]["annotations"] == {AVOIDS: "a,b"}
    assert avoided({0: plain, 1: created}) == {"a", "b"}
    text = json.dumps(created["spec"])
    hosts = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}
    assert json.dumps(hosts) in text
    assert json.dumps(term) in text
    assert spec.affinity == affinity
