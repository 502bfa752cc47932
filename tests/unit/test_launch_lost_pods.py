"""A pod that was removed while it ran tells nothing, and its job is tried again all the same."""

from typing import Any

from kfp_ddp.components.launch.failure import root_cause


def pod(name: str, code: int | None = None, message: str = "") -> dict[str, Any]:
    """A pod, running or ended with an exit code."""
    ended = {"exitCode": code, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
    state = {"running": {}} if code is None else {"terminated": ended}
    return {
        "metadata": {"name": f"train-0-{name}", "uid": name, "labels": {}},
        "status": {"phase": "Running", "containerStatuses": [{"name": "pytorch", "state": state}]},
    }


def test_a_lost_pod_alone_is_the_cause() -> None:
    failure = root_cause([pod("master-0")], "1 Worker replica(s) failed.", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.line.endswith("its pod was removed while it ran")


def test_a_lost_pod_explains_a_closed_connection() -> None:
    peer = pod("master-0", 1, "RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    failure = root_cause([peer], "", lost=[pod("worker-0")])
    assert failure.retryable
    assert failure.line.endswith("its pod was removed while it ran")


def test_a_lost_pod_hides_no_error_of_the_user() -> None:
    failure = root_cause([pod("master-0", 2, "ValueError: no")], "", lost=[pod("worker-0")])
    assert not failure.retryable
    assert "ValueError: no" in failure.line
