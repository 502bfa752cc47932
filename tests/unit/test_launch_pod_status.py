"""What the status of one pod tells: whether it waits, writes, failed, and for how long it stops."""

from typing import Any

import pytest

from kfp_ddp.k8s.pods import (
    ended_at,
    has_crashed,
    has_failed,
    has_started,
    seconds_to_stop,
    waits,
    was_restarted,
    writes_no_more,
)

BARE: dict[str, Any] = {"metadata": {"name": "a"}}
MADE = "2026-01-01T00:00:00Z"


def pod(phase: str = "", *containers: dict[str, Any], **status: Any) -> dict[str, Any]:
    named = [{"name": f"c{number}", **item} for number, item in enumerate(containers)]
    return {**BARE, "status": {"phase": phase, "containerStatuses": named, **status}}


def ended(code: int | None, at: str | None = None) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "finishedAt": at}}}


RUNS: dict[str, Any] = {"state": {"running": {}}}
WAITS: dict[str, Any] = {"state": {"waiting": {}}}
NOTHING = [BARE, {**BARE, "status": None}, {**BARE, "status": {"containerStatuses": None}}]


@pytest.mark.parametrize("bare", NOTHING)
def test_a_pod_without_a_status_waits(bare: dict[str, Any]) -> None:
    assert waits(bare)
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
        ("Failed", False, False),
    ],
)
def test_waiting_and_writing_follow_from_the_phase(phase: str, waiting: bool, writes: bool) -> None:
    assert (waits(pod(phase)), not writes_no_more(pod(phase))) == (waiting, writes)
    assert has_failed(pod(phase)) == (phase == "Failed")


@pytest.mark.parametrize(
    ("container", "started"),
    [
        (RUNS, True),
        (ended(0), True),
        (WAITS, False),
        ({"state": None}, False),
        ({**WAITS, "restartCount": 1}, True),
        ({**WAITS, "restartCount": 0}, False),
    ],
)
def test_a_container_has_a_log_once_it_ran(container: dict[str, Any], started: bool) -> None:
    assert has_started(pod("Pending", RUNS, container), "c1") is started
    assert not has_started(pod("Pending", RUNS, container), "c2")


def test_a_pod_that_is_stopped_may_run_for_its_time_of_grace() -> None:
    stopped = {"name": "a", "deletionTimestamp": MADE}
    grace = {"spec": {"terminationGracePeriodSeconds": 30}}
    assert seconds_to_stop({**pod("Running"), **grace, "metadata": stopped}) == 30
    assert seconds_to_stop({**pod("Running"), **grace}) == 0
    assert seconds_to_stop({**pod("Failed"), **grace, "metadata": stopped}) == 0
    assert seconds_to_stop({**pod("Running"), "metadata": stopped}) == 0
    assert seconds_to_stop({**pod("Running"), "metadata": stopped, "spec": {}}) == 0


def test_a_pod_ended_with_its_first_container() -> None:
    one, other = "2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z"
    assert ended_at(pod("Failed", ended(1, other), RUNS, ended(1, one))) == one
    assert ended_at(pod("Failed", ended(1), ended(1, other))) == other
    assert ended_at(pod("Failed", ended(1), {"state": None})) == "~"
    assert max("9999-12-31T23:59:59Z", "~") == "~", "what is not known sorts last"


@pytest.mark.parametrize(
    ("codes", "failed", "crashed"),
    [
        ((0, 0), False, False),
        ((None,), False, False),
        ((0, 1), True, True),
        ((143,), True, False),
        ((143, 0, 2), True, True),
    ],
)
def test_a_crash_is_no_stop(codes: tuple[int | None, ...], failed: bool, crashed: bool) -> None:
    seen = pod("Running", *map(ended, codes), RUNS)
    assert (has_failed(seen), has_crashed(seen)) == (failed, crashed)
    evicted = pod("Running", *map(ended, codes), conditions=[{"type": "DisruptionTarget"}])
    assert not has_crashed(evicted)
    ready = pod("Running", *map(ended, codes), conditions=[{"type": "Ready"}])
    assert has_crashed(ready) == crashed


def test_a_container_that_ended_before_was_restarted() -> None:
    again = {**RUNS, "lastState": {"terminated": {"exitCode": 0}}}
    assert was_restarted(pod("Running", RUNS, again))
    assert not was_restarted(pod("Running", RUNS, {**RUNS, "lastState": None}))
    assert not was_restarted(pod("Running", {**RUNS, "lastState": {"running": {}}}))
