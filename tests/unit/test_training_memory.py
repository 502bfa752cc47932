"""The allocator of ranks on CPUs, asked in processes of their own: its settings are for good."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from kfp_ddp.training.distributed import keep_freed

if sys.argv[1] == "keep":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # a few times it takes more, until what it needs fits between the rest
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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_used_again_without_asking_the_kernel() -> None:
    assert 4 * faults("keep") < faults("as it is")
