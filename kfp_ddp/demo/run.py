"""Run the demo: bucket up and filled, pipeline in a child process, results gathered."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from kfp_ddp.base.errors import JobError, StorageError
from kfp_ddp.base.folders import DATA_VARIABLE, WORK_VARIABLE
from kfp_ddp.demo import bucket, results
from kfp_ddp.demo.screen import Phase

ANSI = re.compile(r"\x1b\[[0-9;]*m")
STARTED = re.compile(r"Executing task '([^']+)'")
ENDED = re.compile(r"Task '([^']+)' finished with status (\w+)")
REFRESH_SECONDS = 0.2
GRACE_SECONDS = 10.0

DIGITS: dict[str, Any] = {
    "source": f"gs://{bucket.BUCKET}",
    "recipe": "digits",
    "training": {"checkpoint_epochs": 4, "checkpoint_minutes": 0.0},
    "sync": {"dataset": "digits"},
    "gate": {"min_accuracy": 0.97},
    "backend": "local",
    "model_name": "digits",
    "destination": f"gs://{bucket.MODELS}/digits",
}


def run(output: Path, ranks: int, arguments: dict[str, object]) -> dict[str, Any]:
    """Run the whole pipeline, leave what it made in `output`, and return the summary.

    `output/summary.json` holds the summary: accuracy (0 to 1), seconds, bundle and report
    (paths), and the other figures of `results.summary`.

    Raises:
        JobError: if the pipeline failed; the line names the step, its error and the log.
    """
    started = time.monotonic()
    _prepare(output)
    with bucket.serve() as url:
        with Phase("bucket") as phase:
            phase.show(f"filling gs://{bucket.BUCKET}")
            images = bucket.fill(url)
            phase.show(f"{images:,} images in gs://{bucket.BUCKET}, served by gcp-storage-emulator")
        given = DIGITS | arguments | {"job": {"nproc_per_node": ranks}}
        environment = {
            DATA_VARIABLE: str(output / "data"),
            WORK_VARIABLE: str(output / "work"),
            "STORAGE_EMULATOR_HOST": url,
        }
        _pipeline(output, given, environment)
    return results.gather(output, seconds=time.monotonic() - started)


def _prepare(output: Path) -> None:
    """Remove the results of the run before; the bucket and the synced data stay."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("artifacts", "work", "bundle"):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / "pipeline.log").write_text("")
    except OSError as error:
        raise StorageError(
            f"cannot write to {output}: {error.strerror}; choose another folder with --output"
        ) from error


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
        raise JobError(f"{failed or 'the pipeline'} failed: {reason}; the log is {log}")


class _Follower:
    """Turns the child's log into phases on the screen; `failed` names the step that failed."""

    def __init__(self, output: Path) -> None:
        self.failed = ""
        self._output = output
        self._phase: Phase | None = None

    def read(self, line: str) -> None:
        """Begin or end a phase if the line says that a step did."""
        if begun := STARTED.search(line):
            self._phase = Phase(begun[1])
            self._phase.show("")
        elif (ended := ENDED.search(line)) and self._phase is not None:
            phase, self._phase = self._phase, None
            good = ended[2] == "SUCCESS"
            phase.detail = results.detail(self._output, phase.name) if good else "failed"
            phase.end(good)
            self.failed = self.failed or ("" if good else phase.name)

    def tick(self) -> None:
        """Draw the running phase again, with its progress."""
        phase = self._phase
        if phase is not None:
            phase.show(results.progress(self._output) if phase.name == "train" else "")


def _follow(child: subprocess.Popen[str], output: Path) -> str:
    """Log and show the child's output until it ends; the name of a failed step, or ''."""
    assert child.stdout is not None
    follower = _Follower(output)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
    reader.start()
    with (output / "pipeline.log").open("a") as log:
        while True:
            try:
                line = lines.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                follower.tick()
                continue
            if line is None:
                child.wait()
                return follower.failed
            plain = ANSI.sub("", line)
            log.write(plain)
            log.flush()
            follower.read(plain)


def _read(stream: IO[str], lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


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
        if child.stdout is not None:
            child.stdout.close()
        signal.signal(signal.SIGTERM, before)


def _end_tree(root: psutil.Process) -> None:
    tree = [*root.children(recursive=True), root]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, tree = psutil.wait_procs(tree, timeout=GRACE_SECONDS)
