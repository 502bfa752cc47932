"""Failures of ranks, launchers and pods, and the first cause."""

import json
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.failure import RECORD, Failure, final_failure, lost_peer, read, write_record
from kfp_ddp.jobs.failure import ROOT, LogError, cause_in_pods, error_in_log
from tests.cluster import ended, waiting, worker


def test_failure_has_the_format_of_earlier_versions() -> None:
    failure = Failure(143, 3, "stopped", retryable=True, time=12.5, consequence=True)
    assert Failure.parse(f"a line of the program\n{failure.to_json()}\n") == failure
    written = json.loads(Failure(2, 0, "no data", False, 1.5, pod="job-worker-0").to_json())
    earlier = {"exit_code": 2, "rank": 0, "error": "no data", "retryable": False, "time": 1.5}
    assert written == {**earlier, "consequence": False}
    assert Failure.parse(json.dumps(earlier)) == Failure(2, 0, "no data", False, 1.5)


@pytest.mark.parametrize(
    "text", ["", "\n", "ValueError: x", "[1]", "7", '{"error": "x"}', '{"rank": "x", "error": ""}']
)
def test_other_text_is_not_a_failure(text: str) -> None:
    assert Failure.parse(text) is None


LOST = [
    "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4242",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the server shutdown?",
    "Timed out waiting 1800000ms for recv operation to complete",
    "torch.distributed.DistStoreError: Socket Timeout",
    "RendezvousTimeoutError: 2 of 4",
    "NCCL error in: x.cpp:1, remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exit",
    "ncclSystemError: System call (e.g. socket, malloc) failed",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    "SignalException: Process 8 got signal: 15",
    "stopped by SIGTERM; the checkpoint of step 5 is durable",
    "ORTE has lost communication with a remote daemon.",
]
OTHER = [
    "ValueError: no such layer",
    "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "TimeoutError: timed out waiting for the labels",
    "loss is nan at step 12",
]


@pytest.mark.parametrize("text", [*LOST, *OTHER])
def test_message_of_a_lost_peer_is_recognized(text: str) -> None:
    assert lost_peer(text) == (text in LOST)


def test_final_record_is_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "0", tmp_path / "1", tmp_path / "none"]
    for path, failure, final in (
        (files[0], Failure(1, 0, "crashed", False, 1.0), False),
        (files[1], Failure(143, 1, "the heartbeat is stale", True, 2.0), True),
    ):
        monkeypatch.setenv(RECORD, str(path))
        write_record(failure, final)
    kept = "the checkpoint of step 5 is durable"
    assert final_failure(files, kept) == Failure(
        143, 1, f"the heartbeat is stale; {kept}", True, 2.0
    )
    monkeypatch.delenv(RECORD)
    write_record(Failure(1, 0, "x", False), final=True)


def pod(index: int, code: int, message: str = "", at: int = 0, **more: Any) -> dict[str, Any]:
    return worker(index, ended(code, message, at, more.pop("reason", "Error")), **more)


def rank_record(rank: int, error: str, retryable: bool = False) -> str:
    return json.dumps({"exit_code": 1, "rank": rank, "error": error, "retryable": retryable})


@pytest.mark.parametrize(
    "consequence",
    [
        rank_record(0, "RuntimeError: Connection closed by peer [10.0.0.1]:4242"),
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ],
)
def test_the_cause_comes_before_its_consequences(consequence: str) -> None:
    cause = rank_record(3, "ValueError: no such layer")
    result = cause_in_pods([pod(0, 1, consequence, at=1), pod(1, 1, cause, at=2)], "")
    assert result.error == "worker-1: rank 3: ValueError: no such layer"
    assert not result.retryable
    assert result.pod == "x-worker-1"


def test_signals_lost_peers_and_timeouts_are_tried_again_and_memory_is_not() -> None:
    assert cause_in_pods([pod(0, 143)], "").retryable
    lost = rank_record(0, "RuntimeError: Connection closed by peer")
    assert cause_in_pods([pod(0, 1, lost)], "").retryable
    assert cause_in_pods([pod(0, 1, "Watchdog caught collective operation timeout")], "").retryable
    result = cause_in_pods([pod(0, 137, reason="OOMKilled")], "")
    assert not result.retryable
    assert "raise memory" in result.error


def test_an_evicted_pod_is_the_cause_and_tried_again() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "message": "preempted by big"}
    result = cause_in_pods([pod(0, 1, "boom"), pod(1, 143, conditions=[condition])], "")
    assert result.error == "worker-1: preempted by big"
    assert result.retryable


@pytest.mark.parametrize(
    ("why", "message", "retryable"),
    [
        ("UnexpectedAdmissionError", "Allocate failed due to requested number of devices", True),
        ("OutOfnvidia.com/gpu", "Node didn't have enough resource", True),
        ("ReasonOfTomorrow", "", True),
        ("SysctlForbidden", 'forbidden sysctl: "kernel.msgmax" not allowlisted', False),
        ("AppArmor", "Cannot enforce AppArmor: pod requires a profile", False),
    ],
)
@pytest.mark.parametrize("waits", [{}, {"containerStatuses": [{"name": "x", "state": waiting()}]}])
def test_node_rejects_a_pod(why: str, message: str, retryable: bool, waits: dict[str, Any]) -> None:
    status = {"phase": "Failed", "reason": why, "message": message, **waits}
    rejected = {**worker(1), "status": status}
    result = cause_in_pods([pod(0, 1, "boom", at=5), rejected], "1 Worker replica(s) failed")
    assert result.error == f"worker-1: {why}: {message}".rstrip(": ")
    assert (result.retryable, result.pod) == (retryable, "x-worker-1")


def test_a_pod_past_its_own_deadline_is_not_tried_again() -> None:
    ended_by = pod(0, 143, "boom")
    for why, retryable in (("DeadlineExceeded", False), ("ReasonOfTomorrow", True)):
        ended_by["status"]["reason"] = why
        result = cause_in_pods([ended_by], "")
        assert (result.retryable, "boom" in result.error) == (retryable, retryable)


def test_the_log_replaces_a_missing_message_and_the_job_missing_pods() -> None:
    result = cause_in_pods([pod(0, 1)], "", {"worker-0": ["KeyError: 'x'"]})
    assert result.error == "worker-0: exit code 1: KeyError: 'x'"
    assert cause_in_pods([], "has reached the specified limit").error.startswith("has reached")


def test_the_first_failure_within_one_second_is_the_cause() -> None:
    """Kubernetes knows whole seconds; our launcher's own message knows when a rank failed."""

    def message(rank: int, time: float, **more: Any) -> str:
        return json.dumps({"rank": rank, "error": f"ValueError: {rank}", "time": time, **more})

    pods = [pod(0, 1, message(0, 1000.2), at=1), pod(1, 1, message(1, 1000.1), at=1)]
    assert cause_in_pods(pods, "").error == "worker-1: rank 1: ValueError: 1"
    pods[1] = pod(1, 1, message(1, 1000.1, consequence=True), at=1)
    assert cause_in_pods(pods, "").error == "worker-0: rank 0: ValueError: 0"


REPORT = """\
E1121 14:53:53.818000 1 site-packages/torch/distributed/elastic/multiprocessing/api.py:1002] \
failed (exitcode: {code}) local_rank: 0 (pid: 8) of binary: /usr/bin/python3
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
script.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_14:53:53
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 8)
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""

SEE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"

RANKS = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "script.py", line 9, in <module>
[rank0]:   File "script.py", line 10, in <module>
[rank1]: ValueError: no such layer
[rank1]: which has a second line
[rank0]: RuntimeError: Connection closed by peer [10.244.0.53]:62375.
"""

CHAIN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File x
[rank1]: KeyError: 'x'

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File y
[rank1]: ValueError: no such layer
"""

RECORDED = 'Traceback (most recent call last):\n    File "x", line 1, in main\n  KeyError: 1\n'
SIGNAL = "Signal 11 (SIGSEGV) received by PID 8"


@pytest.mark.parametrize(
    ("log", "recorded", "code", "error"),
    [
        (RANKS, SEE, 1, "ValueError: no such layer"),
        # A rank that joined no group has no prefix.
        ("epoch 1\nTraceback (most recent call last):\nKeyError: 'x'\n", SEE, 1, "KeyError: 'x'"),
        (CHAIN, SEE, 1, "ValueError: no such layer"),
        ("epoch 1\n", SIGNAL, -11, SIGNAL),
        ("epoch 1\n", RECORDED, 1, "KeyError: 1"),
        # A program that only prints before it ends.
        ("cannot read /data\n", SEE, 3, "cannot read /data"),
        ("", SEE, 3, "exit code 3"),
    ],
)
def test_the_error_of_torchruns_rank(log: str, recorded: str, code: int, error: str) -> None:
    report = REPORT.format(traceback=recorded, code=code)
    assert error_in_log((log + report).splitlines()) == LogError(error, 1)


def test_another_program_s_last_line_that_is_no_rule() -> None:
    assert error_in_log(["ValueError: x", "", "====="]) == LogError("ValueError: x")
    assert error_in_log([]) == LogError("")


MPIRUN = """\
epoch 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no such layer")
ValueError: no such layer
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[10415,1],1]
  Exit code:    1
--------------------------------------------------------------------------
"""


def test_mpirun_names_a_rank_that_raised_one_that_was_killed_and_a_lost_node() -> None:
    """As Open MPI 4.1 wrote them."""
    assert error_in_log(MPIRUN.splitlines()) == LogError("ValueError: no such layer", 1)
    killed = "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 (Killed)."
    assert error_in_log(["epoch 1", "-" * 74, killed, "-" * 74]) == LogError("signal 9 (Killed)", 3)
    lost = ["ORTE has lost communication with a remote daemon.", "", "  HNP daemon: x", "the job."]
    assert error_in_log(lost) == LogError(lost[0])
    without_traceback = ["bad flag --x", *MPIRUN.splitlines()[5:]]
    assert error_in_log(without_traceback) == LogError("bad flag --x", 1)


def test_a_record_that_is_nested_too_deep_is_no_failure(tmp_path: Path) -> None:
    (file := tmp_path / "failure.json").write_text("[" * 100_000)
    assert read(tmp_path) is None
    assert final_failure([file], "") is None


@pytest.mark.parametrize("rank", ["", "x (local_rank: 0)"])
def test_a_report_of_torchrun_that_is_cut_is_read(rank: str) -> None:
    assert error_in_log([ROOT, f"  rank      : {rank}", "  exitcode  : "]).rank == -1
