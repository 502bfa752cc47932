"""Progress, traces and memory of ranks, and which of them the others wait for."""

import io
import json
import platform
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kfp_ddp.training.watch import Progress, remove_stale
from tests.files import write
from tests.training_ranks import config, dataset, output_of
from tests.waiting import until

FAULTS = """
import resource, sys
import torch
from kfp_ddp.training.distributed import keep_freed

if sys.argv[1] == "keep":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # at first it takes more, until the blocks fit between others
    torch.ones(16 * 2**20)
before = faults()
torch.ones(16 * 2**20)
print(faults() - before)
"""
DECODE = """
import resource, sys
from kfp_ddp.core.errors import InputError
from kfp_ddp.training.data.image_files import read
import torchcodec.decoders
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read(sys.argv[1])
except InputError as error:
    assert 'max_pixels=100000000' in str(error), error
else:
    sys.exit('decoded')
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return text


def test_rank_writes_its_place_and_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_DDP_NODE", "node-a")
    monkeypatch.setattr(Progress, "INTERVAL_SECONDS", 0.01)
    folder = tmp_path / "ranks"
    with Progress(folder, 3) as progress:
        until((folder / "3.json").exists)
        first = told(folder, 3)
        assert (first["rank"], first["pod"], first["node"]) == (3, socket.gethostname(), "node-a")
        assert (first["step"], first["phase"], first["step_seconds"]) == (0, "start", 0)
        progress.step, progress.phase = 5, "data"
        until(lambda: told(folder, 3)["step"] == 5)
        later = told(folder, 3)
        assert later["phase"] == "data"
        assert later["step_seconds"] > 0
        assert later["time"] >= first["time"]
        until(lambda: told(folder, 3)["time"] > later["time"])
        assert told(folder, 3)["step_seconds"] == later["step_seconds"], "no step, no news"
        progress.step, progress.phase = 6, "evaluate"
    assert (told(folder, 3)["step"], told(folder, 3)["phase"]) == (6, "evaluate")
    assert [path.name for path in folder.iterdir()] == ["3.json"]


def test_unwritable_folder_of_progress_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ranks").touch()
    with Progress(tmp_path / "ranks", 0) as progress:
        progress.step = 1
    remove_stale(tmp_path / "ranks", 1)
    assert (tmp_path / "ranks").read_bytes() == b""


def test_progress_of_earlier_ranks_is_removed(tmp_path: Path) -> None:
    for name in ("0.json", "1.json", "2.json", "10.json", "other.json", "kept.txt"):
        (tmp_path / name).touch()
    remove_stale(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json", "kept.txt"]


@pytest.mark.slow
def test_straggler_is_reported(tmp_path: Path) -> None:
    root = dataset(tmp_path / "data", train=48)
    run = config(root, tmp_path / "run", epochs=2, log_steps=2)
    write(tmp_path / "run" / "ranks" / "2.json", "{}")
    printed = output_of(run, 2, env={"SLOW_RANK": "1", "KFP_DDP_NODE": "node-b"})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    *lines, of_ranks, end = map(json.loads, text.splitlines())
    steps = [line for line in lines if line["event"] == "step"]
    assert all(len(step["rank_seconds"]) == 2 for step in steps)
    assert Counter(step["slowest_rank"] for step in steps).most_common(1)[0][0] == 1
    assert all(step["slowest_ratio"] >= 1 for step in steps)
    assert "images/s; rank 1 takes " in printed
    assert steps[-1]["slowest_phase"] == "forward", "that is where it sleeps"
    assert steps[-1]["straggles"] is True
    by_rank = of_ranks["seconds"]
    assert by_rank["forward"][1] - by_rank["forward"][0] > 12 * 0.2
    assert by_rank["communication"][0] > 12 * 0.2 > by_rank["communication"][1]
    total = sum(sum(each) for each in by_rank.values())
    assert total / 2 == pytest.approx(end["seconds"], abs=0.1), "no moment counts for none or two"
    assert "the time went: " in printed
    (line,) = (each for each in end["advice"] if "rank 1 on node-b takes " in each)
    assert ", in forward, and they wait for it " in line
    assert line in printed
    folder = tmp_path / "run" / "ranks"
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "1.json"]
    assert [told(folder, rank)["step"] for rank in (0, 1)] == [12, 12]
    assert [told(folder, rank)["phase"] for rank in (0, 1)] == ["save", "save"]


def result_of(script: str, argument: str) -> int:
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_reused_without_the_kernel() -> None:
    """Page faults of 64 MiB after the same size was freed."""
    assert 4 * result_of(FAULTS, "keep") < result_of(FAULTS, "default")


def test_memory_does_not_depend_on_the_size_in_a_header(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(content, "PNG")
    (tmp_path / "bomb.png").write_bytes(content.getvalue())
    unit = 1 if sys.platform == "darwin" else 1024
    assert result_of(DECODE, str(tmp_path / "bomb.png")) * unit < 50e6


def test_rank_0_traces_the_steps_that_profile_steps_asks_for(tmp_path: Path) -> None:
    run = config(dataset(tmp_path / "data", train=48), tmp_path / "run", epochs=2, profile_steps=2)
    output_of(run, 2)
    (file,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert any("convolution_backward" in name for name in names)
