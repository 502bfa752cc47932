"""A trace of one rank, asked for while it trains."""

import gzip
import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client import trace as tracing
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import RunFolder, TraceRequest
from tests.training_ranks import Ranks, config, dataset


def ask(place: Path | str, rank: int = 0, minutes: float = 1.0) -> Path:
    return tracing.trace(str(place), rank, 3, Path("unused"), minutes, lambda line: None)


@pytest.mark.slow
def test_running_rank_traces_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_POLL_SECONDS", 0.05)
    run = config(dataset(tmp_path / "data"), tmp_path / "run", epochs=5000, warmup_epochs=0)
    ranks = Ranks(run, 2, env={"PROGRESS_SECONDS": "0.05"})
    ranks.wait_for("epoch 1/5000")
    with pytest.raises(InputError, match=r"has no rank 2: its ranks are 0 to 1"):
        ask(tmp_path / "run", rank=2)
    asked = CliRunner().invoke(
        app, ["trace", str(tmp_path / "run"), "--rank", "1", "--steps", "3", "--minutes", "1"]
    )
    assert asked.exit_code == 0, asked.output
    file = Path(asked.stdout.strip())
    assert file.parent == tmp_path / "run" / "traces"
    assert file.name.startswith("rank-1-steps-")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
    assert any("convolution_backward" in name for name in names)
    again = ask(tmp_path / "run", rank=0)
    assert again.name.startswith("rank-0-steps-")
    ranks.kill(0, signal.SIGTERM)
    assert ranks.wait() == [143, 143], ranks.output()
    assert ranks.output().count(" traces the steps ") == 2, "each request once"
    assert f"rank 1 wrote {file}" in ranks.output()
    with pytest.raises(InputError, match=r"has ended: there is nothing to trace"):
        ask(tmp_path / "run")


def test_a_trace_needs_a_running_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"contains no training: name the folder with its metrics"):
        ask(tmp_path)
    run = tmp_path / "out" / "work" / "17" / "train"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"event": "start"}\n')
    with pytest.raises(InputError, match=r"no rank of .*/train has started"):
        ask(tmp_path / "out")
    (run / "ranks").mkdir()
    (run / "ranks" / "0.json").write_text("{}")
    with (run / "metrics.jsonl").open("r+b") as metrics:  # of months
        metrics.seek(65 << 20)
        metrics.write(b'\n{"event": "end"}\n')
    with pytest.raises(InputError, match=r"has ended: there is nothing to trace"):
        ask(tmp_path / "out")
    (run / "metrics.jsonl").write_text('{"event": "start"}\n')
    with pytest.raises(JobError, match=r"rank 0 of .*/train wrote no trace within 0 minutes"):
        ask(tmp_path / "out", minutes=0)
    left = TraceRequest.read(RunFolder(run))
    assert left is not None
    assert (left.rank, left.steps) == (0, 3)
    monkeypatch.setattr(tracing, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(TraceRequest, "matches", lambda self, name: name.endswith("-x.json.gz"))
    (run / "traces").mkdir()
    (run / "traces" / "rank-0-x.json.gz").write_bytes(b"trace")
    brought = tracing.trace(f"file://{run}", 0, 3, tmp_path / "here", 1.0, lambda line: None)
    assert brought.read_bytes() == b"trace"
    assert brought.is_relative_to(tmp_path / "here")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"rank": 0, "steps": 0, "id": "0123456789abcdef"}',
        '{"rank": 0, "steps": 1001, "id": "0123456789abcdef"}',
        '{"rank": 0, "steps": 5, "id": "../../../../../x"}',
        '{"rank": null, "steps": 5, "id": "0123456789abcdef"}',
        '{"rank": 0, "steps": 1e999, "id": "0123456789abcdef"}',
    ],
)
def test_invalid_trace_request_is_ignored(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    assert TraceRequest.read(folder) is None
    (folder.path / folder.TRACE_REQUEST).write_text(text)
    assert TraceRequest.read(folder) is None
