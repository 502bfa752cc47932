import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.jobs import local
from kfp_ddp.runs.teardown.engine import run as teardown

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


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


def test_teardown_ends_a_recorded_group_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with sleeper(*launcher(run_dir)) as child:
        local.record(run_dir, child.pid)
        assert local.recorded(run_dir) == child.pid
        assert teardown("run", "local", {}, str(tmp_path)) == f"ended process group {child.pid}"
        assert child.wait(timeout=10) < 0
        assert teardown("run", "local", {}, str(tmp_path)) == "nothing was left to end"


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


def test_processes_of_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeper(*launcher(tmp_path)) as child:
        local.record(tmp_path, child.pid)
        assert local.recorded(tmp_path) == child.pid
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert local.recorded(tmp_path) is None


def test_start_time_knows_the_living_from_the_dead() -> None:
    assert local.start_time(os.getpid())
    with sleeper() as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert local.start_time(child.pid) is None, "a zombie"
    assert local.start_time(child.pid) is None
