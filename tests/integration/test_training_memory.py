"""Memory of ranks, measured in processes of their own: the allocator's settings are permanent."""

import io
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

FAULTS = """
import resource, sys
import torch
from kfp_ddp.training.distributed import keep_freed

if sys.argv[1] == "keep":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # at first it takes more, until the blocks fit between others
    torch.ones(16 * 2**20)
before = faults()
torch.ones(16 * 2**20)
print(faults() - before)
"""
DECODE = """
import resource, sys
from kfp_ddp.core.errors import InputError
from kfp_ddp.training.images import read
import torchcodec.decoders
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read(sys.argv[1])
except InputError as error:
    assert 'max_pixels=100000000' in str(error), error
else:
    sys.exit('decoded')
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def output(script: str, argument: str) -> int:
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_reused_without_the_kernel() -> None:
    """Page faults of 64 MiB after the same size was freed."""
    assert 4 * output(FAULTS, "keep") < output(FAULTS, "default")


def test_memory_does_not_depend_on_the_size_in_a_header(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(content, "PNG")
    (tmp_path / "bomb.png").write_bytes(content.getvalue())
    unit = 1 if sys.platform == "darwin" else 1024
    assert output(DECODE, str(tmp_path / "bomb.png")) * unit < 50e6
