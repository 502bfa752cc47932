"""Failures of ranks, launchers and pods, and the first cause."""

import json
from pathlib import Path

import pytest

from kfp_ddp.core.failure import (
    RECORD,
    Failure,
    final_failure,
    lost_peer,
    write_record,
)


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


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_message_of_a_lost_peer_is_recognized(text: str) -> None:
    assert lost_peer(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: no such layer",
        "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "TimeoutError: timed out waiting for the labels",
        "loss is nan at step 12",
    ],
)
def test_other_error_is_not_a_lost_peer(text: str) -> None:
    assert not lost_peer(text)


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
