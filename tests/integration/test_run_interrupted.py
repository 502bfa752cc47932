"""`kfp-ddp run --local` that is stopped in one step after the other: each time it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import photographs

pytestmark = pytest.mark.slow
SETTINGS = ("model=cifar_resnet8", "image_size=16", "epochs=12", "checkpoint_steps=2")
PROGRAM = [sys.executable, "-m", "kfp_ddp", "run", "photos", "--local", "--ranks", "2"]
COMMAND = [*PROGRAM, *(word for one in SETTINGS for word in ("--set", one))]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    photographs.write(tmp_path / "photos", each=24)
    (tmp_path / "photos" / "bark" / "birds.ogg").write_text("no image")
    return tmp_path


def newest_step(run: Path) -> int:
    steps = (path.name[5:] for path in run.glob("work/*/*/checkpoints/step-*[0-9]"))
    return max(map(int, steps), default=0)


def stop(step: str, number: signal.Signals, home: Path) -> str:
    """Run the command, send it a signal in a step, and return what it wrote to stderr."""
    run = home / "run-output" / "photos"
    (run / "pipeline.log").unlink(missing_ok=True)
    trained = newest_step(run)
    inside = {**os.environ, "TMPDIR": str(home)}
    with subprocess.Popen(COMMAND, cwd=home, stderr=subprocess.PIPE, text=True, env=inside) as one:
        log = ""
        while f"Executing task '{step}'" not in log or (
            step == "train" and newest_step(run) == trained
        ):
            assert one.poll() is None
            time.sleep(0.02)
            log = (run / "pipeline.log").read_text() if (run / "pipeline.log").exists() else ""
        one.send_signal(number)
        errors = one.communicate()[1]
    if number != signal.SIGKILL:
        assert one.returncode == 130
        assert processes_in(home) == []
        assert not list(home.glob("kfp-ddp-cache-*")), "decoded images are gone, too"
    return errors


def processes_in(folder: Path) -> list[int]:
    """Return the processes with a path in the folder on their command line."""
    return [
        process.info["pid"]
        for process in psutil.process_iter(["pid", "cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def test_same_command_resumes_to_the_bit(home: Path) -> None:
    stop("data-sync", signal.SIGKILL, home)
    assert "the same command resumes (step " in stop("train", signal.SIGINT, home)
    stop("train", signal.SIGKILL, home)
    assert "(step 84 of 84)" in stop("evaluate", signal.SIGTERM, home)
    stop("export", signal.SIGKILL, home)
    done = subprocess.run([*COMMAND, "--json"], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming at step 84 of 84 " in done.stderr
    run = home / "run-output" / "photos"
    assert json.loads(done.stdout)["bundle"] == str(run / "bundle")
    subprocess.run(COMMAND, cwd=home, check=True, capture_output=True)
    again = run.with_name("photos-2")
    models = [one / "bundle" / "model.safetensors" for one in (run, again)]
    assert models[0].read_bytes() == models[1].read_bytes()
    names = {path.name for path in run.parent.iterdir()}
    assert names == {"photos", "photos-2", "data", "latest"}
    assert (run.parent / "latest").resolve() == again
    assert not list(run.parent.glob("data/versions/*/bark/*.ogg"))
