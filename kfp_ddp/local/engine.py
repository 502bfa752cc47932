"""Run a compiled pipeline in a child process, and show its steps."""

import hashlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import click
import psutil

from kfp_ddp.core.errors import JobError, writing
from kfp_ddp.core.folders import DATA_VARIABLE, WORK_VARIABLE
from kfp_ddp.core.outputs import TRAIN, StepOutputs, Warnings
from kfp_ddp.core.step import handling_signals, last_error
from kfp_ddp.jobs.local import environment as child_environment
from kfp_ddp.local import results
from kfp_ddp.local.display import Phase, RunProgress, say
from kfp_ddp.local.folder import LocalRun, LocalStep, link_latest, locked
from kfp_ddp.local.pipeline import TEMPORARY, end_tree
from kfp_ddp.local.results import ENDED, LOG, STARTED
from kfp_ddp.pipelines.form import COMPILED
from kfp_ddp.training.watch import PARENT

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LOOP = re.compile("parameterIterator|artifactIterator")
"""In a pipeline that cannot be resumed: ids of iterations, which run at once, vary."""
Detail = Callable[[Path, str], str]
REFRESH_SECONDS = 0.2
CACHE = "cache"
"""Folder of the decoded images, which the end of a run deletes."""


def run(
    run: LocalRun,
    started: float,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    known: Collection[str] = (),
) -> dict[str, Any]:
    """Run train_resnet as `execute` does; return the summary. `started` is of `time.monotonic`."""
    training = {"cache_dir": str(run.folder / CACHE), **arguments.get("training", {})}
    arguments = {**arguments, "training": training}
    compiled = COMPILED / "train_resnet.yaml"
    run = execute(run, arguments, compiled, results.detail, environment, known)
    summary = results.collect_results(run.folder, seconds=time.monotonic() - started)
    run.replace(complete=True).write()
    return summary


def execute(
    run: LocalRun,
    arguments: Mapping[str, Any],
    compiled: Path,
    detail: Detail,
    environment: Mapping[str, str] = MappingProxyType({}),
    known: Collection[str] = (),
) -> LocalRun:
    """Run a compiled pipeline in the folder of a run, show its steps, and return the ended run.

    `detail` returns a line about a successful step, `environment` are further variables of the
    steps, `known` are notes on the images that were printed before. Raise JobError, which names the
    step, its error and the log.
    """
    output = run.folder
    loop = LOOP.search(compiled.read_text(encoding="utf-8"))

    def again() -> str:
        if loop:
            return "starts over, as the pipeline has a loop"
        return f"resumes ({progress})" if (progress := run.progress()) else "starts again"

    folders = {DATA_VARIABLE: str(run.data), WORK_VARIABLE: str(output / "work")}
    inputs = [json.dumps(arguments), str(output / "artifacts"), str(compiled), run.seed]
    with ExitStack() as stack:
        stack.enter_context(writing(output, "make room, or name another folder with --output"))
        lock = stack.enter_context(locked(output))
        link_latest(run)
        stack.callback(shutil.rmtree, output / CACHE, ignore_errors=True)
        temporary = str(stack.enter_context(_temporary(output)))
        folders |= {"TMPDIR": temporary, TEMPORARY: temporary}
        shutil.rmtree(output / "artifacts", ignore_errors=True)
        for mounted in folders.values():  # preflight sees by them that folders are here
            Path(mounted).mkdir(parents=True, exist_ok=True)
        (output / LOG).write_text("")
        run = run.replace(steps=(), state="", start=time.time(), end=0.0)
        run.write()
        with _stopped_at_the_end(
            subprocess.Popen(
                [sys.executable, "-u", "-m", "kfp_ddp.local.pipeline", *inputs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=child_environment({**folders, **environment, PARENT: str(os.getpid())}),
                pass_fds=(lock,),
                process_group=0,  # Ctrl-C reaches this process alone, which ends the others
            ),
            again,
        ) as child:
            assert child.stdout is not None
            run = _follow(child.stdout, run, detail, known)
            child.wait()
        failed = next((step.name for step in run.steps if step.state == "FAILED"), "")
        state = "FAILED" if failed or child.returncode != 0 else "SUCCEEDED"
        run = run.replace(state=state, end=time.time())
        run.write()
    if state == "FAILED":
        reason = last_error((output / LOG).read_text()) or f"exit code {child.returncode}"
        reason = reason.removeprefix("training failed: ")  # the step is train
        at = "" if loop else run.progress()
        resumes = f"; the same command resumes at {at}" if at else ""
        raise JobError(
            f"{failed or 'the pipeline'} failed: {reason}; the log is {output / LOG}{resumes}"
        )
    return run


@contextmanager
def _temporary(output: Path) -> Iterator[Path]:
    """Yield a new folder for temporary files of a run, and delete it at the end.

    It is in the run's folder unless no socket can be there: its address has at most 107 bytes. What
    a killed command left is deleted first.
    """
    folder = output / ".tmp"
    prefix = f"kfp-ddp-{hashlib.sha256(os.fsencode(output)).hexdigest()[:12]}-"
    for left in (folder, *Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(longest := folder / f"{'probe':-<48}"))
        longest.unlink()
    except OSError:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _follow(stream: IO[str], run: LocalRun, detail: Detail, known: Collection[str]) -> LocalRun:
    """Log the child's output, record and show its steps until it ends; return the run with them."""
    output = run.folder
    steps: dict[str, LocalStep] = {}
    phase: Phase | None = None
    progress = RunProgress(output)

    def record(step: LocalStep) -> None:
        nonlocal run
        # Of a loop, a later iteration does not hide one that failed.
        if step.name not in steps or steps[step.name].state != "FAILED":
            steps[step.name] = step
            run = run.replace(steps=tuple(steps.values()))
            run.write()

    with (output / LOG).open("a") as log:
        for line in _lines(stream):
            if line:
                log.write(line)
                log.flush()
            if begun := STARTED.search(line):
                record(LocalStep(name=begun[1], state="RUNNING", start=time.time()))
                phase = Phase(begun[1])
                phase.show("")
            elif phase is None:
                continue
            elif ended := ENDED.search(line):
                good = ended[2] == "SUCCESS"
                state = "SUCCEEDED" if good else "FAILED"
                if (step := steps.get(ended[1])) is not None:
                    record(step.model_copy(update={"state": state, "end": time.time()}))
                _end(phase, output, good, detail, known)
                phase = None
            elif not line:
                phase.show(progress.line(phase.width) if phase.name == TRAIN.step else "")
    return run


def _end(phase: Phase, output: Path, good: bool, detail: Detail, known: Collection[str]) -> None:
    """End the line of a step with its detail or its failure, and print its new warnings."""
    phase.detail = detail(output, phase.name) if good else "failed"
    phase.end(good)
    if not good:
        return
    values = results.outputs_of(output, StepOutputs(phase.name, Warnings))
    for note in str(values.get("warnings", "")).splitlines():
        if note not in known:
            say(f"note: {note}")


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield the lines of a stream without colours, and '' every `REFRESH_SECONDS` of silence."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        line: str | None = ""
        with suppress(queue.Empty):
            line = lines.get(timeout=REFRESH_SECONDS)
        if line is None:
            return
        yield ANSI.sub("", line)


@contextmanager
def _stopped_at_the_end(
    child: subprocess.Popen[str], again: Callable[[], str]
) -> Iterator[subprocess.Popen[str]]:
    """End the child and its descendants after the block; an interrupt exits with 130.

    `again` returns what the same command does then.
    """
    interrupted = False
    with handling_signals(signal.default_int_handler, signal.SIGTERM):
        try:
            yield child
        except KeyboardInterrupt:
            interrupted = True
            click.echo("\nstopping; a training saves a checkpoint (again: stop at once)", err=True)
        finally:
            if child.poll() is None:
                end_tree(psutil.Process(child.pid))
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    if interrupted:
        click.echo(f"stopped, all processes have ended; the same command {again()}", err=True)
        raise SystemExit(130)
