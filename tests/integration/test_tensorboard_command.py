"""`kfp-ddp tensorboard`, with TensorBoard itself."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from kfp_ddp.client.run_files import StoredFiles
from kfp_ddp.client.tensorboard import LogDir, fetch_metrics
from tests.kfp_server.server import KfpServer


def events(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 1000.0 + i, **e}) + "\n" for i, e in enumerate(lines))
    return folder


def step(number: int, loss: float | None) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, "rank_seconds": [0.1]}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard reads there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(one.step, round(one.value, 3)) for one in events.Scalars(tag)]


def test_curves_grow_and_what_a_resume_does_again_counts_once(tmp_path: Path) -> None:
    run = events(tmp_path / "run", {"event": "start", "resumed_from_step": 0}, step(1, 3.0))
    process = LogDir(tmp_path / "process")
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0)]
    events(run, step(2, 2.5), step(3, 2.0), step(4, None))
    half = (run / "metrics.jsonl").read_text() + '{"event": "step", "st'
    (run / "metrics.jsonl").write_text(half)
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0), (2, 2.5), (3, 2.0)]
    whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0] + "\n"
    (run / "metrics.jsonl").write_text(whole)
    events(run, {"event": "start", "resumed_from_step": 2}, step(3, 1.9))
    events(run, {"event": "eval", "step": 3, "epoch": 1, "accuracy": 0.9})
    process.update("run", run)
    assert scalars(tmp_path / "process/run", "step/loss") == [(1, 3.0), (2, 2.5), (3, 1.9)]
    assert scalars(tmp_path / "process/run", "eval/accuracy") == [(3, 0.9)]


def test_of_a_run_come_its_metrics_and_the_events_of_scripts_of_ones_own(tmp_path: Path) -> None:
    run = tmp_path / "runs/1f0c"
    events(run / "train", step(1, 3.0))
    for task in ("train", "mine"):
        (run / task / "tensorboard").mkdir(parents=True)
        (run / task / "tensorboard/events.out.tfevents.1").write_bytes(b"")
        (run / task / "checkpoint.pt").write_bytes(b"large")
    fetch_metrics(StoredFiles(str(run)), tmp_path / "brought")
    files = {p.relative_to(tmp_path / "brought") for p in (tmp_path / "brought").rglob("*.*")}
    assert set(map(str, files)) == {
        "train/metrics.jsonl", "mine/tensorboard/events.out.tfevents.1"
    }  # fmt: skip
    LogDir(tmp_path / "process").update("1f0c", tmp_path / "brought")
    assert (tmp_path / "process/1f0c/mine-tensorboard").is_symlink()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{}"], "there are no metrics of a training in"),
        (["{}/none"], "not found: give one of run --local"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["tensorboard", *(one.format(tmp_path) for one in words)])
    assert why in str(answer.exception)


def test_a_folder_and_a_run_of_kfp_until_ctrl_c(tmp_path: Path, kfp_server: KfpServer) -> None:
    run_id = "8fa2b9a1-6d87-4473-ad43-69c2efa3bcc0"
    for name in ("photos/work/1f0c", f"runs/{run_id}"):
        events(tmp_path / name / "train", step(1, 3.0))
    given = {"parameters": {"work": f"file://{tmp_path}/runs"}}
    kfp_server.record("run_get_failed", runtime_config=given)
    words = [str(tmp_path / "photos"), "last", "--host", kfp_server.url]
    command = [sys.executable, "-m", "kfp_ddp", "tensorboard", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            address = re.match(r"(http://127\.0\.0\.1:\d+) ", line)
            assert address, line
            with urllib.request.urlopen(f"{address[1]}/data/runs", timeout=60) as answer:
                assert sorted(json.load(answer)) == ["photos", "shapes-1 8fa2b9a1"]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address[1], timeout=5)
