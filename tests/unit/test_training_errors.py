"""The type of an error says how a rank ends: its exit code, and whether to try again."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, PeerLostError, StorageError
from kfp_ddp.training import rank, watch
from kfp_ddp.training.checkpoint import UnreadableError
from kfp_ddp.training.distributed import World

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
def test_a_rank_ends_by_type_and_as_the_one_that_is_the_cause(
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
    told = json.loads(record.read_text())
    assert told["message"]["message"] == "bad"
    assert (told["exit_code"], told["rank"], told["final"]) == (code, 3, True)
    assert (told["retryable"], told["consequence"]) == (retryable, of_another_rank)


def test_a_full_disk_is_told_in_one_line(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(OSError(errno.ENOSPC, "No space left on device"), monkeypatch)
    assert rank.main(ARGV) == 1
    told = json.loads(record.read_text())
    assert "cannot write to /o: No space left on device" in told["message"]["message"]
    assert (told["final"], told["retryable"], told["consequence"]) == (True, False, False)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/pair.cc:1] Connection closed by peer [10.0.0.1]:1"), True),
        (RuntimeError("NCCL error: Duplicate GPU detected"), False),
        (ValueError("connection reset"), False),
    ],
)
def test_what_nobody_foresaw_is_raised_and_a_lost_peer_is_no_cause(
    error: Exception, lost: bool, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(error, monkeypatch)
    with pytest.raises(type(error)):
        rank.main(ARGV)
    told = json.loads(record.read_text())
    assert told["message"]["message"] == f"{type(error).__name__}: {error}"
    assert (told["exit_code"], told["final"]) == (1, False)
    assert (told["retryable"], told["consequence"]) == (lost, lost)


def test_ranks_without_a_launcher_that_starts_them_again_signal_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(watch.RESTARTS, raising=False)
    monkeypatch.setattr("os.kill", lambda *args: pytest.fail("a signal was sent"))
    watch.end_for_good()
