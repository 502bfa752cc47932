"""Run the committed pipeline in a child process, show it phase by phase, gather what it made."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from kfp_ddp.core.errors import InputError, JobError, StorageError
from kfp_ddp.core.folders import DATA_VARIABLE, WORK_VARIABLE
from kfp_ddp.local import results
from kfp_ddp.local.pipeline import COMPILED
from kfp_ddp.local.results import ENDED, LOG, STARTED
from kfp_ddp.local.screen import Phase

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Detail = Callable[[Path, str], str]
REFRESH_SECONDS = 0.2
GRACE_SECONDS = 10.0


def prepare(output: Path) -> None:
    """Make `output` ready for a run: the work of the one before goes, its data and results stay.

    Raises:
        InputError: the folder holds what no run wrote.
        StorageError: it cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()) and not (output / LOG).is_file():
            raise InputError(
                f"{output} holds files that are not of a run, and some might be deleted; "
                "name a new or an empty folder with --output"
            )
        for name in ("artifacts", "work"):
            shutil.rmtree(output / name, ignore_errors=True)
        (output / LOG).write_text("")
    except OSError as error:
        raise StorageError(
            f"cannot write to {output}: {error.strerror}; choose another folder with --output"
        ) from error


def run(
    output: Path,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    started: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train in a folder that `prepare` made ready, and return the summary.

    `output/summary.json` holds the summary: accuracy (0 to 1), seconds, bundle and report
    (paths), and the other figures of `results.gather`.

    Args:
        output: The folder.
        arguments: Those of the pipeline train_resnet.
        environment: Variables of its steps, beside those of this process.
        started: `time.monotonic` when the whole began.
        meanwhile: What to do while the pipeline starts.

    Raises:
        JobError: if the pipeline failed; the line names the step, its error and the log.
    """
    cache = output / "cache"
    training = {"cache_dir": str(cache), **arguments.get("training", {})}
    try:
        given = {**arguments, "training": training}
        execute(output, COMPILED, given, environment, results.detail, meanwhile)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return results.gather(output, seconds=time.monotonic() - started)


def execute(
    output: Path,
    compiled: Path,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detail: Detail,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run a compiled pipeline in a folder that `prepare` made ready, and show its steps.

    Args:
        output: The folder; it gets the log, and artifacts below `artifacts`.
        compiled: The YAML.
        arguments: Those of the pipeline.
        environment: Variables of its steps, beside those of this process.
        detail: Tells of a step that ended well what it made, by the folder and its name.
        meanwhile: What to do while the pipeline starts.

    Raises:
        JobError: if the pipeline failed; the line names the step, its error and the log.
    """
    folders = {DATA_VARIABLE: str(output / "data"), WORK_VARIABLE: str(output / "work")}
    module = [sys.executable, "-u", "-m", "kfp_ddp.local.pipeline"]
    with _stopped_at_the_end(
        subprocess.Popen(
            [*module, json.dumps(arguments), str(output / "artifacts"), str(compiled)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **folders, **environment},
        )
    ) as child:
        meanwhile()
        failed = _follow(child, output, detail)
    if failed or child.returncode != 0:
        reason = results.last_error(output / LOG) or f"exit code {child.returncode}"
        raise JobError(f"{failed or 'the pipeline'} failed: {reason}; the log is {output / LOG}")


class _Follower:
    """Turns the child's log into phases on the screen; `failed` names the step that failed."""

    def __init__(self, output: Path, detail: Detail) -> None:
        self.failed = ""
        self._output, self._detail = output, detail
        self._phase: Phase | None = None

    def read(self, line: str) -> None:
        """Begin or end a phase if the line says that a step did."""
        if begun := STARTED.search(line):
            self._phase = Phase(begun[1])
            self._phase.show("")
        elif (ended := ENDED.search(line)) and self._phase is not None:
            phase, self._phase = self._phase, None
            good = ended[2] == "SUCCESS"
            phase.detail = self._detail(self._output, phase.name) if good else "failed"
            phase.end(good)
            self.failed = self.failed or ("" if good else phase.name)

    def tick(self) -> None:
        """Draw the running phase again, with its progress."""
        phase = self._phase
        if phase is not None:
            phase.show(results.progress(self._output) if phase.name == "train" else "")


def _follow(child: subprocess.Popen[str], output: Path, detail: Detail) -> str:
    """Log and show the child's output until it ends; the name of a failed step, or ''."""
    assert child.stdout is not None
    follower = _Follower(output, detail)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
    reader.start()
    with (output / LOG).open("a") as log:
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
