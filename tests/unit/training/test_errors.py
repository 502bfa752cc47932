"""How ranks end: exit code, retry and cause follow from the type of the error."""

import contextlib
import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, PeerLostError, StorageError
from kfp_ddp.core.failure import Failure, cause_in_error_files, read, report
from kfp_ddp.evaluation.predict import scored
from kfp_ddp.training import distributed, own_script, rank, watch
from kfp_ddp.training.distributed import World
from kfp_ddp.training.state.checkpoint import UnreadableError
from tests.training_ranks import ALONE, run
from tests.waiting import until

ARGV = ["--data", "/d", "--output-dir", "/o"]
CASES = [
    (InputError("bad"), 2, False),
    (JobError("bad"), 1, False),
    (StorageError("bad"), 1, False),
    (UnreadableError("bad"), 1, True),
]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    return tmp_path / "error.json"


def _fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let training raise; the list grows when the ranks are not to be started again."""
    ended: list[str] = []

    def run(*args: Any) -> bool:
        raise error

    monkeypatch.setattr(rank, "run", run)
    monkeypatch.setattr(rank, "end_for_good", lambda: ended.append("for good"))
    return ended


@pytest.mark.parametrize("of_another_rank", [False, True])
@pytest.mark.parametrize(("error", "code", "retryable"), CASES)
def test_exit_code_and_retry_follow_from_the_type_of_the_cause(
    error: KfpDdpError,
    code: int,
    retryable: bool,
    of_another_rank: bool,
    record: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = World(3, 4, 3, 4, torch.device("cpu"))
    with pytest.raises(KfpDdpError) as raised:
        here.raise_on_all(error, 0 if of_another_rank else 3)
    assert isinstance(raised.value, PeerLostError) is of_another_rank
    ended = _fail_with(raised.value, monkeypatch)
    assert rank.main(ARGV) == code
    assert ended == ([] if retryable else ["for good"])
    assert capsys.readouterr().err == "error: bad\n"
    failure = json.loads(record.read_text())
    assert failure["message"]["message"] == "bad"
    assert (failure["exit_code"], failure["rank"], failure["final"]) == (code, 3, True)
    assert (failure["retryable"], failure["consequence"]) == (retryable, of_another_rank)


CURE = ". Set micro_batch_size=auto"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space"), "cannot write to /o: No space"),
        (torch.OutOfMemoryError("Tried 2 GiB. 1 GiB free. Process 7 has 9"), f"1 GiB free{CURE}"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), f"ALLOC_FAILED{CURE}"),
        (RuntimeError("MPS backend out of memory (9 GB)\nmore"), f"(9 GB){CURE}"),
        (RuntimeError("unhandled cuda error\nCuda failure 2 'out of memory'"), f"memory'{CURE}"),
    ],
)
def test_what_is_full_is_one_line_with_the_cure(
    error: Exception, words: str, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _fail_with(error, monkeypatch)
    assert rank.main(ARGV) == 1
    failure = json.loads(record.read_text())
    assert words in failure["message"]["message"]
    assert (failure["final"], failure["retryable"], ended) == (True, False, ["for good"])
    assert not failure["consequence"]


def test_full_memory_of_other_programs_has_their_cure(tmp_path: Path) -> None:
    full = MagicMock(side_effect=RuntimeError("HIP out of memory. Tried 2 GiB"), image_size=8)
    batches = scored(full, full, map(full, "a"), ALONE, full, "fp32")
    with pytest.raises(JobError, match="2 GiB: lower batch_size"):
        next(batches)
    (tmp_path / "own.py").write_text("raise RuntimeError('HIP out of memory. Tried 2 GiB')")
    with pytest.raises(JobError, match="2 GiB: lower the batch size"):
        own_script.call(str(tmp_path / "own.py"), [])


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/pair.cc:1] Connection closed by peer [10.0.0.1]:1"), True),
        (RuntimeError("NCCL error: Duplicate GPU detected"), False),
        (ValueError("connection reset"), False),
    ],
)
def test_unexpected_error_is_raised_and_a_lost_peer_is_a_consequence(
    error: Exception, lost: bool, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(error, monkeypatch)
    with pytest.raises(type(error)):
        rank.main(ARGV)
    failure = json.loads(record.read_text())
    assert failure["message"]["message"] == f"{type(error).__name__}: {error}"
    assert (failure["exit_code"], failure["final"]) == (1, False)
    assert (failure["retryable"], failure["consequence"]) == (lost, lost)


def test_ranks_that_are_not_restarted_send_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(watch.RESTARTS, raising=False)
    monkeypatch.setattr("os.kill", lambda *args: pytest.fail("a signal was sent"))
    watch.end_for_good()


class _Failure:
    def __init__(self, code: int, at: float, text: str = "", consequence: bool = False) -> None:
        self.exitcode, self.timestamp = code, int(at)
        self.error_file_data: dict[str, Any] = {}
        if text:
            message = {"message": text, "extraInfo": {}}
            self.error_file_data = {"message": message, "time": at}
            self.error_file_data["consequence"] = consequence

    def signal_name(self) -> str:
        return "SIGKILL"


def test_root_cause_is_the_first_failure_that_is_not_a_consequence() -> None:
    class Error:
        failures = {  # noqa: RUF012
            0: _Failure(1, 10.1, "RuntimeError: Connection closed by peer", consequence=True),
            1: _Failure(-15, 11.0),
            2: _Failure(1, 10.9, "ValueError: later"),
            3: _Failure(1, 10.5, "ValueError: first"),
        }

    cause = cause_in_error_files(Error(), "kept")
    assert (cause.rank, cause.error, cause.exit_code) == (3, "ValueError: first", 1)
    assert not cause.retryable
    Error.failures = {0: Error.failures[0], 1: _Failure(-9, 10.0)}
    killed = cause_in_error_files(Error(), "kept")
    assert (killed.rank, killed.exit_code) == (1, 137)
    Error.failures = {0: _Failure(2, 10.0, "cannot read it")}
    assert not cause_in_error_files(Error(), "kept").retryable
    Error.failures[0].error_file_data["retryable"] = True
    assert cause_in_error_files(Error(), "kept").retryable
    Error.failures = {0: _Failure(143, 10.0), 1: _Failure(143, 11.0)}
    assert cause_in_error_files(Error(), "kept").error == "preempted; kept"


@pytest.mark.parametrize("letter", ["x", "é", "\N{SMILING FACE WITH SUNGLASSES}", '"'])
def test_long_error(letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = tmp_path / "termination"
    monkeypatch.setenv("KFP_DDP_TERMINATION_LOG", str(message))
    failure = Failure(2, 0, f"it begins {letter * 5000} and ends", retryable=False)
    assert report(failure, tmp_path / "failure.json") == 2
    assert len(message.read_bytes()) <= 4096
    recorded = read(tmp_path)
    assert recorded is not None
    assert recorded.error.startswith("it begins")
    assert recorded.error.endswith("and ends")
    assert message.read_bytes() == (tmp_path / "failure.json").read_bytes()


@pytest.mark.parametrize(
    ("device", "fails", "end"),
    [("cuda", True, "abort"), ("cuda", False, "destroy"), ("cpu", True, "destroy")],
)
def test_after_an_error_nccl_is_aborted_and_never_waited_for(
    device: str, fails: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, never = list[str](), threading.Event()

    def abort() -> None:
        ends.append("abort")
        never.wait()

    group = SimpleNamespace(abort=abort)
    world = World(0, 2, 0, 2, torch.device(device))
    monkeypatch.setattr(distributed, "start", lambda _: world)
    monkeypatch.setattr(distributed, "ABORT_SECONDS", 0.05)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ends.append("destroy"))
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group))
    with contextlib.suppress(InputError), distributed.joined(run()):
        if fails:
            raise InputError("bad")
    until(lambda: ends == [end], lambda: str(ends))
    never.set()
