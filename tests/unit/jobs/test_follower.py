"""The loop that follows a job: what it makes of what its watches hold, without a cluster."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs.ending import Ending, StepFiles
from kfp_ddp.jobs.follow import follower as following
from kfp_ddp.jobs.follow.decisions import Limits, Pods, Snapshot, Verdict
from kfp_ddp.jobs.follow.follower import Follower
from kfp_ddp.jobs.follow.narrator import StatusPrinter
from kfp_ddp.jobs.follow.printer import LogCursor, Printer, Stamp
from kfp_ddp.jobs.follow.ranks import StallWatch
from kfp_ddp.jobs.identity import Owner
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import Reason
from tests.cluster import MADE, ended, hold, job, nowhere, pod
from tests.launch_specs import made

JOB = job()


class Ends(Ending):
    """Counts what it deletes, and asks nobody."""

    def __init__(self, owner: Owner | None = None) -> None:
        super().__init__(nowhere(), owner)
        self.deleted = 0

    def delete_job(self) -> None:
        self.deleted += 1

    def keep_open(self) -> None:
        pass


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ends:
    monkeypatch.setattr(following, "DRAIN_SECONDS", 0)
    monkeypatch.setattr(following, "TURN_SECONDS", 0)
    return Ends(Owner("step", "workflow", "uid"))


def follower(ending: Ending, *jobs: Object, kind: str = "pytorchjob", **pods: Object) -> Follower:
    """One whose watches hold these jobs and pods, by uid; none of them is started."""
    return hold(Follower(nowhere(), KINDS[kind], JOB, ending, None), pods, *jobs)


def test_a_job_that_its_operator_calls_failed_is_over_and_stays(ending: Ends) -> None:
    outcome = follower(ending, job("Failed", message="why")).run(Limits())
    assert (outcome.state.phase, outcome.state.message) == ("failed", "why")
    assert not outcome.given_up
    assert ending.deleted == 0


def test_an_adopted_job_that_has_failed_is_judged_by_its_pods(ending: Ends) -> None:
    """Its own watch may be the first: then a preemption would be a failure that is not retried."""
    one = follower(ending, job("Failed"))
    one.watches.pods.synced.clear()
    assert one._look() is None
    one.watches.pods.synced.set()
    assert one._look() is not None


def test_a_pod_that_was_cleaned_up_is_part_of_how_a_job_ended(ending: Ends) -> None:
    one = follower(ending, job("Failed"))
    gone = pod("a", ended(1))
    one.pods = Pods(KINDS["pytorchjob"], started(JOB)).look(JOB, {"a": gone}, {}, 1)
    assert one.run(Limits()).pods == [gone]


def test_a_stopping_pod_is_waited_for(ending: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may save for as long as its time of grace, and only then says that it was stopped."""
    one = follower(ending, job("Failed"))
    saves = pod("a", spec={"terminationGracePeriodSeconds": 120})
    saves["metadata"]["deletionTimestamp"] = MADE
    stopped = {**saves, "status": {"phase": "Failed"}}
    looks = iter([saves, saves, saves, stopped])
    monkeypatch.setattr(
        one.ending.changed, "wait", lambda timeout: one.watches.pods.objects.update(a=next(looks))
    )
    assert one.run(Limits()).pods == [stopped]
    assert next(looks, None) is None


def test_nothing_is_waited_for_that_is_not_being_stopped(ending: Ends) -> None:
    runs = pod("a")
    assert follower(ending, job("Failed"), a=runs).run(Limits()).pods == [runs]


def test_a_job_that_was_given_up_is_marked_so(ending: Ends) -> None:
    one = follower(ending, job("Running"))
    crash = pod("a", ended(1))
    one.pods = Pods(KINDS["pytorchjob"], started(JOB)).look(JOB, {"a": crash}, {}, 1)
    outcome = one.run(Limits(crashes=1))
    assert outcome.given_up
    assert outcome.pods == [crash]


def test_node_of_a_stall(ending: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(1, -1, "rank 1 is silent", retryable=True)
    stall = Verdict(State("failed", failure.error), True, failure=failure, node="node-1")
    monkeypatch.setattr(StallWatch, "look", lambda self, look, limit: stall)
    following_ranks = Follower(nowhere(), KINDS["pytorchjob"], JOB, ending, tmp_path, progress=True)
    following_ranks.watches = follower(ending, job("Running")).watches
    outcome = following_ranks.run(Limits(stall=1))
    assert (outcome.failure, outcome.node) == (failure, "node-1")
    assert outcome.given_up


def test_node_that_rejected_a_pod(ending: Ends) -> None:
    rejected = pod("a", spec={"nodeName": "node-1"}, phase="Failed", reason="OutOfcpu")
    rejected["status"].pop("containerStatuses")
    outcome = follower(ending, job("Failed"), a=rejected).run(Limits())
    assert (outcome.failure and outcome.failure.retryable, outcome.node) == (True, "node-1")


def test_the_end_of_preempted_pods_is_marked_so(ending: Ends) -> None:
    worker = pod("a", ended(143))
    one = follower(ending, job("Failed"), a=worker)
    one.pods = replace(one.pods, present={"a": worker}, preempted=frozenset({"a"}))
    assert one.run(Limits()).preempted


def test_a_trainjob_that_lost_a_part_of_itself_is_deleted(ending: Ends) -> None:
    one = follower(ending, {**JOB, "spec": {}}, kind="trainjob")
    one.sent = {"spec": made("trainjob")}
    with pytest.raises(JobError, match="TrainJob x has lost runtimePatches and was deleted"):
        one.run(Limits())
    assert ending.deleted == 1


def test_a_job_deleted_by_another_user_is_a_job_error(ending: Ends) -> None:
    leaving = {**JOB, "metadata": {**JOB["metadata"], "deletionTimestamp": MADE}}
    for present in ((), (leaving,)):
        with pytest.raises(JobError, match="PyTorchJob x was deleted by another user"):
            follower(ending, *present).run(Limits())
    assert ending.deleted == 0


def test_a_job_removed_at_its_end_keeps_its_state(ending: Ends) -> None:
    """Its operator removes it at once where ttl_seconds is 0."""
    ended = job("Succeeded")
    leaving = {**ended, "metadata": {**JOB["metadata"], "deletionTimestamp": MADE}}
    assert follower(ending, leaving).run(Limits()).state.phase == "succeeded"
    for last, phase in ((leaving, "succeeded"), (job("Failed"), "failed")):
        one = follower(ending)
        one.watches.jobs.removed = {JOB["metadata"]["uid"]: last}
        assert one.run(Limits()).state.phase == phase
    one.watches.jobs.removed = {JOB["metadata"]["uid"]: job("Running")}
    with pytest.raises(JobError, match="PyTorchJob x was deleted by another user"):
        one.run(Limits())


def test_missing_rights_to_watch_are_an_input_error(ending: Ends) -> None:
    one = follower(ending)
    one.watches.jobs.forbidden = "no right"
    with pytest.raises(InputError, match="cannot watch PyTorchJob x: no right"):
        one.run(Limits())


def test_a_cancelled_run_deletes_its_job_and_is_an_error_of_its_own(ending: Ends) -> None:
    workflow = {"metadata": {"uid": "w"}, "spec": {"activeDeadlineSeconds": 0}}
    ending.watches[0].objects = {"w": workflow}
    with pytest.raises(RunCancelledError, match="the run was terminated; PyTorchJob x is deleted"):
        follower(ending, job("Running")).run(Limits(deadline=1))
    assert ending.deleted == 1


def test_the_queue_is_requested_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[float] = []
    queued = {**JOB, "spec": {"runPolicy": {"suspend": True}}}
    narrator, kind = StatusPrinter(Printer(), nowhere()), KINDS["pytorchjob"]

    def tell(clock: float, job: Object, reason: str) -> None:
        def explain(*fields: Any) -> dict[str, Reason]:
            requests.append(clock)
            return {"": Reason("", reason)}

        monkeypatch.setattr("kfp_ddp.jobs.follow.narrator.explain", explain)
        narrator.report(Snapshot(kind, job, Pods(kind, started(job)), True, now=0, clock=clock), [])

    for clock in range(100, 200):
        tell(clock, queued, "third in line")
    assert requests == [100, 102, 106, 114, 130, 160, 190]
    tell(220, queued, "second in line")
    requests.clear()
    for clock in range(221, 228):
        tell(clock, JOB, "worker: no node")
    assert requests == [222, 224, 226]
    assert capsys.readouterr().out.splitlines() == [
        "x is queued: third in line",
        "x is queued: second in line",
        "x is created: worker: no node",
    ]
    tell(300, job("Failed"), "")
    assert requests == [222, 224, 226]


def test_heartbeat_and_saved_cursors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, printer = RunFolder(tmp_path), Printer()
    files = StepFiles(folder, "x", printer)
    files.update(100)
    assert folder.heartbeat.exists()
    folder.heartbeat.unlink()
    printer.cursors["a/pytorch"] = LogCursor(0, Stamp(1, 0), 1)
    files.update(109)
    assert not folder.heartbeat.exists()
    assert folder.log_positions("x").read_text() == '{"a/pytorch": [0, 1, 0, 1]}'
    files.update(110)
    assert folder.heartbeat.exists()
    gone = StepFiles(RunFolder(tmp_path / "gone"), "x", printer)
    gone.update(time.monotonic())
    assert "warning: cannot touch" in capsys.readouterr().out


def test_a_step_that_leaves_prints_no_line_that_its_successor_prints_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other processes may need the processor.
    monkeypatch.setattr("kfp_ddp.jobs.follow.printer.STOP_SECONDS", 10)
    folder, printer = RunFolder(tmp_path), Printer()
    files, over = StepFiles(folder, "x", printer), threading.Event()
    printed = threading.Semaphore(0)

    def lines() -> None:
        number = 0
        while not over.is_set():
            printer.line("a/pytorch", LogCursor(0, Stamp(1, 0), number), str(number))
            number += 1
            printed.release()

    writer = threading.Thread(target=lines)
    writer.start()
    assert printed.acquire(timeout=10)
    files.save_and_stop()
    for _ in range(1000):
        assert printed.acquire(timeout=10)
    over.set()
    writer.join()
    last = int(capfd.readouterr().out.splitlines()[-1])
    assert folder.log_positions("x").read_text() == f'{{"a/pytorch": [0, 1, 0, {last}]}}'


def test_a_step_leaves_in_the_midst_of_a_line_of_its_own() -> None:
    printer = Printer()
    with printer.lock:  # as where a signal interrupts `say`
        printer.stop()
    assert printer.over


def test_pods_of_a_deleted_job_of_the_same_name_do_not_count(ending: Ends) -> None:
    old, new = pod("x-worker-0", uid="old"), pod("x-worker-0", ended(1), uid="new")
    old["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"
    new["metadata"]["creationTimestamp"] = MADE
    assert follower(ending, job("Failed"), old=old, new=new).run(Limits()).pods == [new]


@pytest.mark.parametrize("event", [{"event": "eval", "accuracy": None}, {"event": "step"}])
def test_odd_metrics_end_no_following(ending: Ends, tmp_path: Path, event: dict[str, Any]) -> None:
    one = Follower(nowhere(), KINDS["pytorchjob"], JOB, ending, tmp_path, progress=True)
    RunFolder(tmp_path).metrics.write_text(f"{json.dumps(event)}\n")
    assert hold(one, {}, job("Succeeded")).run(Limits()).failure is None
