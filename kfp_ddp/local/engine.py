"""Run a compiled pipeline in a child process, and show its steps."""

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
from kfp_ddp.core.step import last_error
from kfp_ddp.local import results
from kfp_ddp.local.pipeline import COMPILED
from kfp_ddp.local.results import ENDED, LOG, STARTED
from kfp_ddp.local.screen import Phase

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Detail = Callable[[Path, str], str]
REFRESH_SECONDS = 0.2
GRACE_SECONDS = 10.0


def prepare(output: Path) -> None:
    """Create the folder, or remove the work of the previous run from it; data and results stay.

    Raises:
        InputError: the folder has files of another origin.
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
    """Run train_resnet as `execute` does, and return the summary of `results.gather`.

    Args:
        output: The folder.
        arguments: Arguments of the pipeline.
        environment: Further environment variables of its steps.
        started: `time.monotonic` at the start of the command.
        meanwhile: Called while the pipeline starts.

    Raises:
        JobError: the pipeline failed; the line names the step, its error and the log.
    """
    cache = output / "cache"
    training = {"cache_dir": str(cache), **arguments.get("training", {})}
    try:
        arguments = {**arguments, "training": training}
        execute(output, COMPILED, arguments, environment, results.detail, meanwhile)
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
    """Run a compiled pipeline in a folder of `prepare`, and show its steps.

    Args:
        output: The folder; it gets the log, and artifacts below `artifacts`.
        compiled: The YAML.
        arguments: Arguments of the pipeline.
        environment: Further environment variables of its steps.
        detail: Returns a line about a successful step, from the folder and the step's name.
        meanwhile: Called while the pipeline starts.

    Raises:
        JobError: the pipeline failed; the line names the step, its error and the log.
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
        assert child.stdout is not None
        failed = _follow(child.stdout, output, detail)
        child.wait()
    if failed or child.returncode != 0:
        reason = last_error((output / LOG).read_text()) or f"exit code {child.returncode}"
        reason = reason.removeprefix("training failed: ")  # the step is train
        raise JobError(f"{failed or 'the pipeline'} failed: {reason}; the log is {output / LOG}")


def _follow(stream: IO[str], output: Path, detail: Detail) -> str:
    """Log the child's output and show its steps until it ends; return a failed step or ''."""
    failed, phase = "", None
    with (output / LOG).open("a") as log:
        for line in _lines(stream):
            if line:
                log.write(line)
                log.flush()
            if begun := STARTED.search(line):
                phase = Phase(begun[1])
                phase.show("")
            elif phase is not None and (ended := ENDED.search(line)):
                good = ended[2] == "SUCCESS"
                phase.detail = detail(output, phase.name) if good else "failed"
                phase.end(good)
                failed = failed or ("" if good else phase.name)
                phase = None
            elif phase is not None and not line:
                phase.show(results.progress(output) if phase.name == "train" else "")
    return failed


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a stream without colours, and '' every `REFRESH_SECONDS` of silence."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=REFRESH_SECONDS)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield ANSI.sub("", line)


@contextmanager
def _stopped_at_the_end(child: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Stop the child and all its descendants at the end of the block; ranks have own sessions."""

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
