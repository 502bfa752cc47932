"""`job` as a step on this machine, by KFP's own runner."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from kfp import local
from kfp_ddp.components.job import job
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
task = job(image="a:1", kind="local", work_dir=sys.argv[2], nodes=2, script=sys.argv[3])
print("OUTPUTS", json.dumps({k: getattr(v, "path", v) for k, v in task.outputs.items()}))
"""
SCRIPT = """
import os
from pathlib import Path

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
Path(SAID, rank).write_text(f"{rank} of {world}")
"""


@pytest.mark.slow
def test_a_script_runs_in_all_ranks(tmp_path: Path) -> None:
    """Its ranks are processes of the step, and its record says so."""
    said = tmp_path / "said"
    said.mkdir()
    script = f"SAID = {str(said)!r}\n{SCRIPT}"
    work = tmp_path / "work"
    command = [sys.executable, "-c", STEP, str(tmp_path / "root"), str(work), script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = json.loads(done.stdout.rpartition("OUTPUTS ")[2].splitlines()[0])
    assert (said / "0").read_text() == "0 of 2"
    assert (said / "1").read_text() == "1 of 2"
    assert outputs["Output"] == "job"
    assert json.loads(Path(outputs["job_object"]).read_text())["kind"] == "local"
    assert len(list(work.glob("local-*/job/script.py"))) == 1
