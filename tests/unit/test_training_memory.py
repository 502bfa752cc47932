"""The allocator of ranks on CPUs, asked in processes of their own: its settings are for good."""

import platform
import subprocess
import sys

import pytest

PAGES = 64 * 2**20 // 4096
FAULTS = """
import resource, sys
import torch
from kfp_ddp.training.memory import keep_freed

if sys.argv[1] == "keep":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(16 * 2**20)
before = faults()
torch.ones(16 * 2**20)
print(faults() - before)
"""


def faults(how: str) -> int:
    """Pages that the kernel gave for 64 MiB, of which as many were freed before."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_used_again_without_asking_the_kernel() -> None:
    assert faults("keep") < PAGES / 100
    assert faults("as it is") >= PAGES / 2
