import json
import os
import subprocess
import sys
from pathlib import Path

from kfp_ddp.base.run_folder import RunFolder
from kfp_ddp.components.shared.launch import local_processes
from kfp_ddp.components.teardown.engine import run as teardown


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)


def test_teardown_ends_a_recorded_group_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    child = sleeper()
    local_processes.record(run_dir, child.pid)
    assert local_processes.recorded(run_dir) == child.pid
    assert teardown("run", "local", {}, str(tmp_path)) == f"ended process group {child.pid}"
    assert child.wait(timeout=10) < 0
    assert teardown("run", "local", {}, str(tmp_path)) == "nothing was left to end"


def test_a_pid_that_was_used_again_is_not_touched(tmp_path: Path) -> None:
    child = sleeper()
    try:
        local_processes.record(tmp_path, child.pid)
        entry = json.loads(RunFolder(tmp_path).process.read_text())
        RunFolder(tmp_path).process.write_text(json.dumps({**entry, "started": "1"}))
        assert local_processes.recorded(tmp_path) is None
        RunFolder(tmp_path).process.write_text(json.dumps({**entry, "host": "elsewhere"}))
        assert local_processes.recorded(tmp_path) is None
        RunFolder(tmp_path).process.write_text("not json")
        assert local_processes.recorded(tmp_path) is None
    finally:
        child.kill()
        child.wait()


def test_start_time_knows_the_living_from_the_dead() -> None:
    assert local_processes.start_time(os.getpid())
    child = sleeper()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert local_processes.start_time(child.pid) is None, "a zombie"
    child.wait()
    assert local_processes.start_time(child.pid) is None
