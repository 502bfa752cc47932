"""Run the demo: bucket up and filled, pipeline in a child process, results gathered."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kfp_ddp.demo import bucket, results
from kfp_ddp.demo.screen import Phase
from kfp_ddp.training.errors import InputError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
STARTED = re.compile(r"Executing task '([^']+)'")
ENDED = re.compile(r"Task '([^']+)' finished with status (\w+)")
REFRESH_SECONDS = 0.2
GRACE_SECONDS = 10.0

DIGITS: dict[str, object] = {
    "source": f"gs://{bucket.BUCKET}",
    "dataset": "digits",
    "model": "cifar_resnet8",
    "model_name": "digits",
    "image_size": 16,
    "epochs": 24,
    "batch_size": 32,
    "learning_rate": 0.1,
    "warmup_epochs": 2.0,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "workers": 0,
    "checkpoint_epochs": 8,
    "checkpoint_minutes": 0.0,
    "backend": "local",
    "min_accuracy": 0.97,
    "destination": f"gs://{bucket.MODELS}/digits",
}


def run(output: Path, ranks: int, arguments: dict[str, object]) -> dict[str, Any]:
    """Run the whole pipeline, leave what it made in `output`, and return the summary.

    `output/summary.json` holds the summary: accuracy (0 to 1), seconds, bundle and report
    (paths), and the other figures of `results.summary`.

    Raises:
        InputError: if the pipeline failed; the line names the step, its error and the log.
    """
    started = time.monotonic()
    _prepare(output)
    with bucket.serve() as url:
        with Phase("bucket") as phase:
            phase.show(f"filling gs://{bucket.BUCKET}")
            images = bucket.fill(url)
            phase.show(f"{images:,} images in gs://{bucket.BUCKET}, served by gcp-storage-emulator")
        given = DIGITS | arguments | _folders(output) | {"nproc_per_node": ranks}
        _pipeline(output, given, {"STORAGE_EMULATOR_HOST": url})
    return results.gather(output, seconds=time.monotonic() - started)


def _prepare(output: Path) -> None:
    """Remove the results of the run before; the bucket and the synced data stay."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("artifacts", "work", "bundle"):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / "pipeline.log").write_text("")
    except OSError as error:
        raise InputError(
            f"cannot write to {output}: {error.strerror}; choose another folder with --output"
        ) from error


def _folders(output: Path) -> dict[str, object]:
    return {"data_dir": str(output / "data"), "work_dir": str(output / "work")}


def _pipeline(output: Path, arguments: dict[str, object], environment: dict[str, str]) -> None:
    """Run the child, follow its log phase by phase, and stop all of it however this ends."""
    module = [sys.executable, "-u", "-m", "kfp_ddp.demo.pipeline"]
    command = [*module, json.dumps(arguments), str(output / "artifacts")]
    with _stopped_at_the_end(
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        )
    ) as child:
        failed = _follow(child, output)
    if failed or child.returncode != 0:
        log = output / "pipeline.log"
        reason = results.last_error(log) or f"exit code {child.returncode}"
        raise InputError(f"{failed or 'the pipeline'} failed: {reason}; the log is {log}")


def _follow(child: subprocess.Popen[str], output: Path) -> str:
    """Show each step as a phase until the child's log ends; the name of a failed step, or ''."""
    failed = ""
    phase: Phase | None = None
    with (output / "pipeline.log").open("a") as log:
        for line in _lines(child, on_quiet=lambda: _show(phase, output)):
            plain = ANSI.sub("", line)
            log.write(plain)
            log.flush()
            if begun := STARTED.search(plain):
                phase = Phase(begun[1])
                phase.show("")
            elif (ended := ENDED.search(plain)) and phase is not None:
                good = ended[2] == "SUCCESS"
                failed = failed if good else ended[1]
                phase.detail = results.detail(output, phase.name) if good else "failed"
                phase.end(good)
                phase = None
    child.wait()
    return failed


def _show(phase: Phase | None, output: Path) -> None:
    if phase is not None:
        phase.show(results.progress(output) if phase.name == "train" else phase.detail)


def _lines(child: subprocess.Popen[str], on_quiet: Callable[[], None]) -> Iterator[str]:
    """The child's lines as they come; `on_quiet` is called several times a second besides."""
    assert child.stdout is not None
    done = threading.Event()

    def tick() -> None:
        while not done.wait(REFRESH_SECONDS):
            on_quiet()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield from child.stdout
    finally:
        done.set()
        ticker.join()


@contextmanager
def _stopped_at_the_end(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End the child and everything below it when the block is left; ranks have own sessions."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield child
    finally:
        if child.poll() is None:
            _end_tree(psutil.Process(child.pid))
        child.wait()
        signal.signal(signal.SIGTERM, before)


def _end_tree(root: psutil.Process) -> None:
    tree = [*root.children(recursive=True), root]
    for process in tree:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(tree, timeout=GRACE_SECONDS)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
