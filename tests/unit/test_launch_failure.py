import json
from typing import Any

from kfp_ddp.jobs.failure import root_cause


def pod(index: int, code: int, message: str = "", at: int = 0, **more: Any) -> dict[str, Any]:
    ended = {"exitCode": code, "message": message, "finishedAt": f"2026-11-21T10:00:{at:02}Z"}
    ended |= {"reason": more.pop("reason", "Error")}
    return {
        "metadata": {
            "name": f"job-worker-{index}",
            "uid": f"uid-{index}",
            "labels": {
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": str(index),
            },
        },
        "status": {"containerStatuses": [{"name": "pytorch", "state": {"terminated": ended}}]}
        | more,
    }


def told(rank: int, error: str, retryable: bool = False) -> str:
    return json.dumps({"exit_code": 1, "rank": rank, "error": error, "retryable": retryable})


def test_the_cause_comes_before_its_consequences() -> None:
    lost = told(0, "RuntimeError: Connection closed by peer [10.0.0.1]:4242")
    result = root_cause(
        [pod(0, 1, lost, at=1), pod(1, 1, told(3, "ValueError: no such layer"), at=2)], ""
    )
    assert result.error == "worker-1: rank 3: ValueError: no such layer"
    assert not result.retryable
    assert result.pod == "job-worker-1"


def test_a_timeout_of_nccl_is_no_cause_where_another_pod_has_one() -> None:
    timed_out = pod(0, 1, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", at=1)
    result = root_cause([timed_out, pod(1, 1, told(1, "ValueError: no such layer"), at=2)], "")
    assert result.error == "worker-1: rank 1: ValueError: no such layer"


def test_signals_lost_peers_and_timeouts_are_tried_again_and_memory_is_not() -> None:
    assert root_cause([pod(0, 143)], "").retryable
    lost = told(0, "RuntimeError: Connection closed by peer")
    assert root_cause([pod(0, 1, lost)], "").retryable
    assert root_cause([pod(0, 1, "Watchdog caught collective operation timeout: x")], "").retryable
    result = root_cause([pod(0, 137, reason="OOMKilled")], "")
    assert not result.retryable
    assert "raise memory" in result.error


def test_an_evicted_pod_is_the_cause_and_tried_again() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "message": "preempted by big"}
    result = root_cause([pod(0, 1, "boom"), pod(1, 143, conditions=[condition])], "")
    assert result.error == "worker-1: preempted by big"
    assert result.retryable


def test_the_last_line_of_the_log_replaces_a_missing_message() -> None:
    result = root_cause([pod(0, 1)], "", {"uid-0": ["KeyError: 'x'"]})
    assert result.error == "worker-0: exit code 1: KeyError: 'x'"


def test_without_pods_the_job_speaks() -> None:
    assert root_cause([], "has reached the specified backoff limit").error.startswith("has reached")


def test_the_first_failure_within_one_second_is_the_cause() -> None:
    """Kubernetes knows whole seconds; our launcher's own message knows when a rank failed."""

    def message(rank: int, time: float, **more: Any) -> str:
        return json.dumps({"rank": rank, "error": f"ValueError: {rank}", "time": time, **more})

    pods = [pod(0, 1, message(0, 1000.2), at=1), pod(1, 1, message(1, 1000.1), at=1)]
    assert root_cause(pods, "").error == "worker-1: rank 1: ValueError: 1"
    pods[1] = pod(1, 1, message(1, 1000.1, consequence=True), at=1)
    assert root_cause(pods, "").error == "worker-0: rank 0: ValueError: 0"
