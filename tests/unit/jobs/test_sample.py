"""The state of pods, and those that are followed of many."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.files import read_below
from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.failure import cause_in_pods
from kfp_ddp.jobs.follow import follower as following
from kfp_ddp.jobs.follow import narrator, ranks, sample
from kfp_ddp.jobs.follow.decisions import Limits, Pods, Snapshot
from kfp_ddp.jobs.follow.follower import Follower
from kfp_ddp.jobs.follow.logs import PodLog
from kfp_ddp.jobs.follow.printer import LogCursor, Stamp
from kfp_ddp.jobs.identity import Owner
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import (
    ended_at,
    has_crashed,
    has_failed,
    has_started,
    is_pending,
    seconds_to_stop,
    used_images,
    was_restarted,
    writes_no_more,
)
from kfp_ddp.k8s.resource import CLAIMS
from tests import cluster
from tests.cluster import MADE, RUNS, FakeApi, ended, hold, nowhere, worker

MAIN = ("pytorch",)
BARE: dict[str, Any] = {"metadata": {"name": "a"}}


def pod(number: int, node: int, state: Object = RUNS, role: str = "worker") -> Object:
    return worker(number, state, role, spec={"nodeName": f"node-{node}"})


def job(count: int, nodes: int, **states: Object) -> dict[str, Object]:
    created = [pod(i, i % nodes, states.get(f"w{i}", RUNS)) for i in range(count)]
    random.Random(count).shuffle(created)
    return {item["metadata"]["uid"]: item for item in created}


def chosen(pods: dict[str, Object], begun: dict[str, bool] | None = None) -> list[str]:
    return [item.uid for item in sample.sample(pods, MAIN, begun or {})]


def test_of_many_pods_rank_0_and_one_a_node_are_followed() -> None:
    pods = job(1000, nodes=5)
    result = sample.sample(pods, MAIN, {})
    assert [item.uid for item in result] == [f"worker-{i}" for i in range(5)]
    assert [item.end_only for item in result] == [False, True, True, True, True]
    assert chosen(pods, dict.fromkeys((item.uid for item in result), True)) == []


def test_nodes_are_followed_up_to_a_bound_that_leaves_room_for_failures() -> None:
    pods = job(1000, nodes=500)
    first = chosen(pods)
    assert len(first) == sample.STREAMS - sample.FOR_FAILED
    pods["worker-700"] = pod(700, 200, ended(1, second=9))
    assert chosen(pods, dict.fromkeys(first, True)) == ["worker-700"]


def test_rank_0_is_followed_though_it_starts_last() -> None:
    pods = job(100, nodes=100, w0={"waiting": {}})
    begun = dict.fromkeys(chosen(pods), True)
    assert "worker-0" not in begun
    pods["worker-0"] = pod(0, 0)
    assert chosen(pods, begun) == ["worker-0"]


def test_of_many_that_failed_the_first_are_read_a_few_at_once() -> None:
    """Whichever the watch tells of first, the one that failed first is among them."""
    states = {f"w{i}": ended(1, second=1000 - i) for i in range(900, 950)}
    pods = job(1000, nodes=20, **states)
    begun: dict[str, bool] = {}
    read: list[str] = []
    while result := [item for item in chosen(pods, begun) if item.startswith("worker-9")]:
        assert sum(begun.values()) + len(result) <= sample.STREAMS
        read += result
        begun |= dict.fromkeys(result, False)
    assert read == [f"worker-{i}" for i in range(949, 949 - sample.FAILED, -1)]
    pods["worker-5"] = pod(5, 5, ended(1, second=3))
    assert chosen(pods, begun)[0] == "worker-5"


def test_another_pod_of_a_node_is_followed_after_a_removal() -> None:
    pods = job(100, nodes=2, w1=ended(0, second=5))
    assert chosen(pods, {"worker-0": True, "worker-1": False}) == []
    del pods["worker-1"]
    assert chosen(pods, {"worker-0": True, "worker-1": False}) == ["worker-3"]


def test_the_launcher_of_an_mpijob_is_followed_first() -> None:
    pods = job(100, nodes=100) | {"launcher-0": pod(0, 0, role="launcher")}
    assert chosen(pods)[:2] == ["launcher-0", "worker-0"]


def test_a_reduced_pod_has_the_same_cause(tmp_path: Path) -> None:
    volumes: list[Object] = [
        {"name": "m", "emptyDir": {}},
        {"name": "c", "persistentVolumeClaim": {"claimName": "work"}},
    ]
    container = {"name": "pytorch", "image": "a:1", "env": [{"name": "A"}] * 50}
    spec = {"nodeName": "a", "containers": [container], "volumes": volumes}
    status = {"name": "pytorch", "imageID": "a@sha256:1", "state": ended(1, "no")}
    whole = worker(3, ended(1, "no"), spec=spec, containerStatuses=[status])
    whole["metadata"]["managedFields"] = [{"fieldsV1": {"f:metadata": {}}}] * 20
    few = following.reduced_pod(whole)
    assert len(json.dumps(few)) < len(json.dumps(whole)) / 2
    assert cause_in_pods([few], "") == cause_in_pods([whole], "")
    images = [{"image": "a:1", "digest": "sha256:1"}]
    assert used_images([few], MAIN) == used_images([whole], MAIN) == images
    assert few["spec"]["volumes"] == whole["spec"]["volumes"][1:]


def test_a_stopped_pod_is_not_the_cause() -> None:
    """The operator stops the others as soon as one is gone, and these end with a signal's code."""
    stopped = pod(0, 0, ended(143, second=1))
    stopped["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert "worker-7: its pod was removed" in cause_in_pods([stopped], "", {}, [pod(7, 0)]).error
    alone = cause_in_pods([stopped], "")
    assert (alone.exit_code, alone.retryable) == (143, True)


def follower(pods: dict[str, Object]) -> Follower:
    """One of a failed job with these pods."""
    failed = cluster.job("Failed")
    ending = Ending(nowhere(), Owner("step", "workflow", "uid"))
    ending.keep_open = lambda: None  # type: ignore[method-assign]
    return hold(Follower(nowhere(), KINDS["pytorchjob"], failed, ending, None), pods, failed)


def test_sample_note(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PodLog, "run", lambda self: None)
    created = follower(job(17, nodes=17, **{f"w{i}": {"waiting": {}} for i in range(17)}))
    for pods in (created.watches.pods.objects, created.watches.pods.objects, job(17, nodes=17), {}):
        created.watches.pods.objects = pods
        created._look_at_pods(0)
    created.watches.pods.objects = job(17, nodes=17)
    created._look_at_pods(0)
    assert capsys.readouterr().out.splitlines() == [sample.sample_note(17, "space")]


def test_failed_pods_are_counted_and_the_end_is_not_delayed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread waits for one that runs on, as some of a thousand always do."""
    monkeypatch.setattr(PodLog, "run", lambda self: None)
    pods = job(1000, nodes=20, **{f"w{i}": ended(1, second=i) for i in range(50)})
    monkeypatch.setattr(following, "DRAIN_SECONDS", 3600)
    monkeypatch.setattr(following, "DRAIN_MANY_SECONDS", 0)
    follower(pods).run(Limits(pods=1000))
    out = capsys.readouterr().out
    assert out.splitlines() == [
        sample.sample_note(1000, "space"),
        "50 pods of x failed; the logs of the first 16 are shown",
    ]
    assert "of 1,000 logs" in out
    monkeypatch.setattr(following, "DRAIN_SECONDS", 0)
    follower(job(16, nodes=2, w3=ended(1, second=3))).run(Limits(pods=16))
    assert capsys.readouterr().out == ""


def test_logs_decide_the_first_of_many_failures_in_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods whose last words are of a lost peer are followed by another, until one tells a cause."""

    def write(self: PodLog) -> None:
        at = LogCursor(0, Stamp(1, 0), 1)
        line = "ValueError: no 5" if self.uid == "worker-77" else "Connection closed by peer [::1]"
        self.printer.line(self.key, at, f"[{self.title}] {line}")

    monkeypatch.setattr(PodLog, "run", write)
    monkeypatch.setattr(following, "DRAIN_SECONDS", 3600)
    monkeypatch.setattr(following, "DRAIN_MANY_SECONDS", 0)
    pods = job(100, nodes=20, **{f"w{i}": ended(1, second=9) for i in range(100)})
    outcome = follower(pods).run(Limits(pods=100))
    assert outcome.failure is not None
    assert outcome.failure.error == "worker-77: exit code 1: ValueError: no 5"
    assert "[worker-77] ValueError: no 5" in capsys.readouterr().out
    assert len(outcome.last_lines) > sample.FAILED


def test_a_pvc_of_many_pods_is_requested_once() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "unbound claims"}
    spec = {"volumes": [{"persistentVolumeClaim": {"claimName": "work"}}]}
    waiting: Object = {"waiting": {}}
    pods = [worker(n, waiting, spec=spec, conditions=[condition]) for n in range(1000)]
    claimed = {"status": {"phase": "Pending"}, "spec": {"storageClassName": "slow"}}
    api = FakeApi({CLAIMS.path("space", "work"): claimed})
    about: Object = {"metadata": {"name": "x", "labels": {}}, "spec": {}}
    result = narrator.explain(about, State("created"), pods, [], api, 1000)
    assert len(api.requests) == 2  # for the claim and for its class
    assert narrator.summary(result) == (
        "worker-0, worker-1, worker-10 and 997 more: claim work is not bound (StorageClass slow); "
        "cannot be scheduled (unbound claims)"
    )


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_stall_seen_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pods = job(count, nodes=3)
    for rank in range(count):
        line = {"rank": rank, "pod": f"x-worker-{rank}", "node": "", "phase": "step", "time": 0}
        (tmp_path / f"{rank}.json").write_text(json.dumps({**line, "step": 7}))
    runs = cluster.job("Running")
    seen = Pods(KINDS["pytorchjob"], started(runs)).look(runs, pods, {}, 0)
    still, opened = ranks.StallWatch(tmp_path), 0

    def read_counted(*fields: Any) -> Any:
        nonlocal opened
        opened += 1
        return read_below(*fields)

    monkeypatch.setattr(ranks, "read_below", read_counted)
    for half_seconds in range(200):
        before, clock = opened, half_seconds / 2
        look = Snapshot(KINDS["pytorchjob"], runs, seen, True, clock, clock)
        stall = still.look(look, 20)
        assert opened - before <= ranks.PART
        if stall is not None:
            break
    assert stall is not None
    assert f"all {count} ranks are at step 7" in stall.state.message
    assert 20 <= clock < 30
    assert ranks.StallWatch(tmp_path / "nowhere").look(look, 20) is None


def of_phase(phase: str = "", *containers: dict[str, Any], **status: Any) -> dict[str, Any]:
    named = [{"name": f"c{number}", **item} for number, item in enumerate(containers)]
    return {**BARE, "status": {"phase": phase, "containerStatuses": named, **status}}


def stopped_with(code: int | None, at: str | None = None) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "finishedAt": at}}}


RUNNING: dict[str, Any] = {"state": {"running": {}}}
WAITS: dict[str, Any] = {"state": {"waiting": {}}}
NOTHING = [BARE, {**BARE, "status": None}, {**BARE, "status": {"containerStatuses": None}}]


@pytest.mark.parametrize("bare", NOTHING)
def test_a_pod_without_a_status_waits(bare: dict[str, Any]) -> None:
    assert is_pending(bare)
    assert not writes_no_more(bare)
    assert not has_started(bare, "c0")
    assert not has_failed(bare)
    assert not has_crashed(bare)
    assert not was_restarted(bare)
    assert ended_at(bare) == "~"


@pytest.mark.parametrize(
    ("phase", "waiting", "writes"),
    [
        ("Pending", True, False),
        ("Running", False, True),
        ("Unknown", False, True),
        ("Succeeded", False, False),
    ],
)
def test_waiting_and_writing_follow_from_the_phase(phase: str, waiting: bool, writes: bool) -> None:
    assert (is_pending(of_phase(phase)), not writes_no_more(of_phase(phase))) == (waiting, writes)
    assert has_failed(of_phase(phase)) == (phase == "Failed")


@pytest.mark.parametrize(
    ("container", "started"),
    [
        *((RUNNING, True), (stopped_with(0), True), (WAITS, False), ({"state": None}, False)),
        ({**WAITS, "restartCount": 1}, True),
    ],
)
def test_a_container_has_a_log_once_it_ran(container: dict[str, Any], started: bool) -> None:
    assert has_started(of_phase("Pending", RUNNING, container), "c1") is started
    assert not has_started(of_phase("Pending", RUNNING, container), "c2")


def test_a_pod_that_is_stopped_may_run_for_its_time_of_grace() -> None:
    stopped = {"name": "a", "deletionTimestamp": MADE}
    grace = {"spec": {"terminationGracePeriodSeconds": 30}}
    assert seconds_to_stop({**of_phase("Running"), **grace, "metadata": stopped}) == 30
    assert seconds_to_stop({**of_phase("Running"), **grace}) == 0
    assert seconds_to_stop({**of_phase("Failed"), **grace, "metadata": stopped}) == 0
    assert seconds_to_stop({**of_phase("Running"), "metadata": stopped}) == 0
    assert seconds_to_stop({**of_phase("Running"), "metadata": stopped, "spec": {}}) == 0


def test_a_pod_ended_with_its_first_container() -> None:
    one, other = "2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"
    late = of_phase("Failed", stopped_with(1, other), RUNNING, stopped_with(1, one))
    assert ended_at(late) == one
    assert ended_at(of_phase("Failed", stopped_with(1), stopped_with(1, other))) == other
    assert ended_at(of_phase("Failed", stopped_with(1), {"state": None})) == "~"
    assert max("9999-12-31T23:59:59Z", "~") == "~", "what is not known sorts last"


@pytest.mark.parametrize(
    ("codes", "failed", "crashed"),
    [
        ((0, 0), False, False),
        ((0, 1), True, True),
        ((143,), True, False),
        ((143, 0, 2), True, True),
    ],
)
def test_a_crash_is_no_stop(codes: tuple[int | None, ...], failed: bool, crashed: bool) -> None:
    seen = of_phase("Running", *map(stopped_with, codes), RUNNING)
    assert (has_failed(seen), has_crashed(seen)) == (failed, crashed)
    evicted = of_phase(
        "Running", *map(stopped_with, codes), conditions=[{"type": "DisruptionTarget"}]
    )
    assert not has_crashed(evicted)
    ready = of_phase("Running", *map(stopped_with, codes), conditions=[{"type": "Ready"}])
    assert has_crashed(ready) == crashed


def test_a_container_that_ended_before_was_restarted() -> None:
    again = {**RUNNING, "lastState": {"terminated": {"exitCode": 0}}}
    assert was_restarted(of_phase("Running", RUNNING, again))
    assert not was_restarted(of_phase("Running", RUNNING, {**RUNNING, "lastState": None}))
    assert not was_restarted(of_phase("Running", {**RUNNING, "lastState": {"running": {}}}))
