"""How a job is ended, and its processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.jobs.ending import Ending, StepFiles, handling_all
from kfp_ddp.jobs.follow.printer import Printer
from kfp_ddp.jobs.identity import Owner
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.resource import PODS
from kfp_ddp.k8s.watch_cache import WatchCache
from kfp_ddp.runs.teardown.engine import run as teardown
from tests.cluster import FakeApi

JOB = "/apis/kubeflow.org/v1/namespaces/space/pytorchjobs/x"
POD = "/api/v1/namespaces/space/pods/step"
EVICTED: Object = {"metadata": {"uid": "p", "deletionTimestamp": "now"}, "spec": {"containers": []}}
CANCELLED: Object = {"metadata": {"uid": "w"}, "spec": {"activeDeadlineSeconds": 0}}
ADOPTED = "launcher was evicted; Retry adopts its job, or creates a new one"
GOES_ON = "; job x keeps running for the retry, unless the run fails"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Files:
    """The files of a step whose checkpoints are at these steps."""

    def __init__(self, *steps: int | None) -> None:
        self.steps = iter(steps)
        self.left = False

    def newest_step(self) -> int | None:
        return next(self.steps)

    def save_and_stop(self) -> None:
        self.left = True


def attending(cluster: Any, files: Any = None, *seen: Object) -> Ending:
    """Return one that has seen these objects."""
    ending = Ending(cluster, Owner("step", "workflow", "uid"))
    ending.watches[0].objects = {item["metadata"]["uid"]: item for item in seen}
    ending.watch_job(KINDS["pytorchjob"].resource, "x", files)
    return ending


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file from which Kubernetes reads the termination message."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv("KFP_DDP_TERMINATION_LOG", str(path))
    return path


def ended(
    monkeypatch: pytest.MonkeyPatch, cluster: FakeApi, seen: list[Object], step: int | None
) -> None:
    """Send a signal to a launcher that has seen these objects: Ctrl-C if it has seen none."""
    files = Files(step)
    ending = attending(cluster, files, *seen)

    def leave(code: int) -> None:
        assert (code, files.left) == (143 if seen else 130, True)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(Ending, "active", [ending])
    with handling_all():
        signal.raise_signal(signal.SIGTERM if seen else signal.SIGINT)


@pytest.mark.parametrize(
    ("seen", "step", "error", "part", "asks"),
    [
        ([EVICTED], 40, "launcher was evicted; Retry resumes from step 40 or later", GOES_ON, []),
        ([EVICTED], 0, "launcher was evicted; Retry resumes from step 0 or later", GOES_ON, []),
        ([EVICTED], None, ADOPTED, GOES_ON, []),
        # A run that was terminated ends its pods, too.
        ([EVICTED, CANCELLED], 40, "stopped; job x is deleted", "", [f"DELETE {JOB}"]),
        ([CANCELLED], 40, "stopped; job x is deleted", "", [f"DELETE {JOB}"]),
        # Nobody knows why: its pod is asked for, which gives no answer.
        ([], 40, "stopped; job x is deleted", "", [f"GET {POD}", f"DELETE {JOB}"]),
    ],
)
def test_the_reaction_to_a_signal(
    message: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seen: list[Object],
    step: int | None,
    error: str,
    part: str,
    asks: list[str],
) -> None:
    """Argo makes the error of a step of its termination message."""
    cluster = FakeApi({POD: 0})
    ended(monkeypatch, cluster, seen, step)
    assert message.read_text() == error
    assert capfd.readouterr().err.splitlines()[-1] == error + part
    assert cluster.requests == asks


@pytest.mark.parametrize(
    ("own", "evicted"),
    [(EVICTED, True), ({"metadata": {"uid": "p"}, "spec": {"containers": []}}, False)],
)
def test_an_eviction_is_known_before_its_event(message: Path, own: Object, evicted: bool) -> None:
    """The watch may be late, so the signal is explained by the pod itself."""
    assert attending(FakeApi({POD: own}))._evicted_now() is evicted


def test_an_eviction_is_reported_once(message: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ending = attending(FakeApi({POD: 0}), Files(7, 8, 9))
    ending.report_eviction()
    assert message.read_text() == ""
    ending.watches[1].objects = {"p": EVICTED}
    ending.report_eviction()
    ending.report_eviction()
    assert message.read_text() == "launcher was evicted; Retry resumes from step 7 or later"
    assert capfd.readouterr().err == message.read_text() + "\n"


def test_hanging_step_reports_eviction(message: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sync of the claim may take longer than the step has."""
    api = FakeApi({POD: 0})
    ending = Ending(api, None)
    pods = WatchCache(api, PODS, {}, ending.changed_or_over)
    pods.objects = {"p": EVICTED}
    with ending.watching():
        ending.watches.append(pods)
        pods.changed.set()
        assert ending.changed.wait(60)
    assert message.read_text() == ADOPTED
    assert capfd.readouterr().err == message.read_text() + "\n"


def test_a_reported_step_does_not_change_and_no_termination_log_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error of the step would otherwise name another one than its log."""
    monkeypatch.setenv("KFP_DDP_TERMINATION_LOG", str(tmp_path / "none"))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    ending = attending(FakeApi({POD: 0}), Files(7, 8), EVICTED)
    ending.report_eviction()
    monkeypatch.setattr(Ending, "active", [ending])
    with handling_all():
        signal.raise_signal(signal.SIGTERM)
    line = "launcher was evicted; Retry resumes from step 7 or later"
    assert capfd.readouterr().err.split("\n") == [line, "", line + GOES_ON, ""]
    assert list(tmp_path.iterdir()) == []


def test_a_hanging_pvc_delays_no_report(message: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(monkeypatch, FakeApi({POD: 0}), [EVICTED], None)
    assert message.read_text() == ADOPTED
    released = threading.Event()

    class Hangs(Files):
        def newest_step(self) -> int | None:
            released.wait()
            return 1

    class Fails(Files):
        def newest_step(self) -> int | None:
            raise OSError("stale file handle")

    for files in (Hangs(), Fails()):
        message.write_text("")
        attending(FakeApi({POD: 0}), files, EVICTED).report_eviction()
        assert message.read_text() == ADOPTED
    released.set()


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert StepFiles(folder, "x", Printer()).newest_step() is None
    files = StepFiles(folder, "x", Printer(), trains=True)
    assert files.newest_step() == 0
    for name in ("step-00000009", "step-00000040", ".step-50.tmp", "step-x", "other"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert files.newest_step() == 40


@contextmanager
def sleeper(*words: str, leads: bool = True) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with these words on its command line that does nothing."""
    child = subprocess.Popen([*SLEEP, *words], process_group=0 if leads else None)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def launcher(run_dir: Path) -> list[str]:
    """What stands on the command line of a launcher of ranks."""
    return [local.NODE, "--nproc-per-node=2", "--", "--output-dir", str(run_dir)]


def test_teardown_ends_a_recorded_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with sleeper(*launcher(run_dir)) as child:
        local.record(run_dir, child.pid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert local.recorded(run_dir) is None
        assert local.recorded(run_dir) == child.pid
        assert teardown("run", "local", {}, str(tmp_path)) == f"ended process group {child.pid}"
        assert child.wait(timeout=10) < 0
        assert teardown("run", "local", {}, str(tmp_path)) == "nothing to clean up"


def test_a_pid_that_was_used_again_is_not_touched(tmp_path: Path) -> None:
    with sleeper(*launcher(tmp_path)) as child:
        local.record(tmp_path, child.pid)
        file = RunFolder(tmp_path).process
        entry = json.loads(file.read_text())
        for change in ({"started": "1"}, {"host": "elsewhere"}, {"pid": str(child.pid)}):
            file.write_text(json.dumps({**entry, **change}))
            assert local.recorded(tmp_path) is None
        for text in ("not json", "[]", "3", "[" * 9999, '{"pid": true}'):
            file.write_text(text)
            assert local.recorded(tmp_path) is None


@pytest.mark.parametrize(
    ("words", "leads"),
    [
        ([], True),
        ([local.NODE], True),
        ([local.NODE, "--output-dir"], True),
        (launcher(Path("/another/run")), True),
        (["another.module", *launcher(Path("RUN"))[1:]], True),
        (launcher(Path("RUN")), False),
    ],
)
def test_a_record_of_others_is_not_believed(tmp_path: Path, words: list[str], leads: bool) -> None:
    """Whoever can write to the work claim can write it."""
    with sleeper(*(word.replace("RUN", str(tmp_path)) for word in words), leads=leads) as child:
        local.record(tmp_path, child.pid)
        assert local.recorded(tmp_path) is None


def test_start_time_knows_the_living_from_the_dead() -> None:
    assert local.start_time(os.getpid())
    with sleeper() as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert local.start_time(child.pid) is None, "a zombie"
    assert local.start_time(child.pid) is None
