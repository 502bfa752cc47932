"""The benchmark for a GPU runs on a CPU, part by part, at a tiny size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

PROGRAM = """
import contextlib, json, sys
from pathlib import Path
import torch.distributed as dist
from benchmarks import gpu, rounds
from benchmarks.gpu_parts import loops, ranks, single

@contextlib.contextmanager
def here(make, *of, clock):
    call = make(*of)
    yield lambda: rounds._seconds(call, clock)

loops.apart, loops.STEPS, single.ROUNDS, name = here, 1, 2, "shufflenet_v2_x0_5"
gpu.in_a_process = lambda work, *of: work(*of)
gpu.Measurement.compiled = lambda *of: {}  # needs a compiler
measurement = gpu.Measurement(name, 32, 0.0, float("inf"))
figures = measurement.all(4, 16)
root = gpu.photographs(Path(sys.argv[1]) / "data", 8)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
figures |= ranks.of_rank(str(root), name, 32, {**measurement.fields, "batch_size": 4})
print(json.dumps([len(figures), sorted(sys.modules.keys() & set(sys.argv[2:]))]))
"""


@pytest.mark.slow
def test_each_part_gives_its_figures_with_few_packages(tmp_path: Path) -> None:
    others = ("kfp", "kubernetes", "onnx", "onnxruntime", "click", "timm", "yaml")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [18, []], done.stdout
    assert "left out" not in done.stdout


def test_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.NEEDED, "absent", "absent-package")
    assert gpu.run() == {}
    assert "missing: absent-package;" in capsys.readouterr().out
