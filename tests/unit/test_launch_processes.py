import json
import os
import subprocess
import sys
from pathlib import Path

from kfp_ddp.components.shared.launch.local import processes
from kfp_ddp.components.teardown.engine import run as teardown


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)


def test_teardown_ends_a_recorded_group_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = sleeper()
    processes.record(run_dir, child.pid)
    assert processes.recorded(run_dir) == child.pid
    assert teardown("run", str(tmp_path), "local") == f"ended process group {child.pid}"
    assert child.wait(timeout=10) < 0
    assert teardown("run", str(tmp_path), "local") == "nothing was left to end"


def test_a_pid_that_was_used_again_is_not_touched(tmp_path: Path) -> None:
    child = sleeper()
    try:
        processes.record(tmp_path, child.pid)
        entry = json.loads((tmp_path / processes.RECORD).read_text())
        (tmp_path / processes.RECORD).write_text(json.dumps({**entry, "started": "1"}))
        assert processes.recorded(tmp_path) is None
        (tmp_path / processes.RECORD).write_text(json.dumps({**entry, "host": "elsewhere"}))
        assert processes.recorded(tmp_path) is None
        (tmp_path / processes.RECORD).write_text("not json")
        assert processes.recorded(tmp_path) is None
    finally:
        child.kill()
        child.wait()


def test_start_time_knows_the_living_from_the_dead() -> None:
    assert processes.start_time(os.getpid())
    child = sleeper()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_time(child.pid) is None, "a zombie"
    child.wait()
    assert processes.start_time(child.pid) is None
