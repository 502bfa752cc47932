"""Which attempt a launch goes on with, from the jobs that are there."""

from typing import Any

from kfp_ddp.components.shared.launch.jobs import PREEMPTED, REPORTED
from kfp_ddp.components.shared.launch.run import _where_to_start


def job(ended: str = "", *notes: str) -> dict[str, Any]:
    conditions = [{"type": ended, "status": "True"}] if ended else []
    annotations = dict.fromkeys(notes, "true")
    return {"metadata": {"annotations": annotations}, "status": {"conditions": conditions}}


def test_the_first_one_is_made_and_a_running_one_is_followed() -> None:
    assert _where_to_start({}) == (0, 0)
    assert _where_to_start({0: job()}) == (0, 0)
    assert _where_to_start({0: job("Failed"), 1: job()}) == (1, 0)


def test_a_failure_that_was_told_begins_a_new_series() -> None:
    assert _where_to_start({0: job("Failed", REPORTED)}) == (1, 1)
    assert _where_to_start({0: job("Failed", REPORTED), 1: job()}) == (1, 1)


def test_one_that_failed_of_its_preemption_is_made_anew_in_its_series() -> None:
    assert _where_to_start({0: job("Failed", PREEMPTED)}) == (1, 0)
    assert _where_to_start({0: job("Failed"), 1: job("Failed", PREEMPTED)}) == (2, 0)
