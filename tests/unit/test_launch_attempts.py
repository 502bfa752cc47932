"""Which attempt a launch goes on with, from the jobs that are there."""

from typing import Any

from kfp_ddp.jobs.jobs import PREEMPTED, REPORTED
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.run import Attempts


def job(ended: str = "", *notes: str) -> dict[str, Any]:
    conditions = [{"type": ended, "status": "True"}] if ended else []
    annotations = dict.fromkeys(notes, "true")
    return {"metadata": {"annotations": annotations}, "status": {"conditions": conditions}}


def where_to_start(jobs: dict[int, Any]) -> tuple[int, int]:
    attempts = Attempts.resume(jobs, KINDS["pytorchjob"])
    return attempts.current, attempts.first


def test_a_running_job_is_adopted() -> None:
    assert where_to_start({}) == (0, 0)
    assert where_to_start({0: job()}) == (0, 0)
    assert where_to_start({0: job("Failed"), 1: job()}) == (1, 0)


def test_a_reported_failure_begins_a_new_series() -> None:
    assert where_to_start({0: job("Failed", REPORTED)}) == (1, 1)
    assert where_to_start({0: job("Failed", REPORTED), 1: job()}) == (1, 1)


def test_a_preempted_job_is_replaced_in_its_series() -> None:
    assert where_to_start({0: job("Failed", PREEMPTED)}) == (1, 0)
    assert where_to_start({0: job("Failed"), 1: job("Failed", PREEMPTED)}) == (2, 0)


def test_a_preemption_uses_up_no_retry() -> None:
    attempts = Attempts.resume(
        {0: job("Failed"), 1: job("Failed", PREEMPTED), 2: job("Failed")}, KINDS["pytorchjob"]
    )
    assert (attempts.current, attempts.count) == (2, 3)
    assert attempts.retries_left(3) == 2
    assert Attempts.resume({}, KINDS["pytorchjob"]).retries_left(3) == 3
    attempts = Attempts.resume(
        {0: job("Failed", REPORTED), 1: job("Failed"), 2: job()}, KINDS["pytorchjob"]
    )
    assert (attempts.count, attempts.retries_left(1)) == (2, 0)
