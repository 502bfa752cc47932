"""What this process may use of its machine: CPUs, memory, and the packages of extras."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kfp_ddp.core.errors import InputError

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
"""File of Linux with the hardware threads of the core of a CPU."""
GPUS = "KFP_DDP_GPUS"
"""Environment variable of a worker: the GPUs that its pod requested."""
MEMORY = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files of a cgroup with a limit in bytes; the last one is of version 1."""
_LOCAL = (
    *("numpy", "PIL", "safetensors", "simplejpeg", "torch", "torchcodec", "torchvision"),
    *("onnx", "onnxruntime", "onnxscript", "psutil"),
)
_MODULES = {
    "predict": ("numpy", "PIL"),
    "serve": ("kserve", "numpy"),
    "local": _LOCAL,
    "sweep": ("optuna",),
    "parquet": ("pyarrow",),
    "mlflow": ("mlflow",),
    "registry": ("model_registry",),
    "sign": ("sigstore",),
    "verify": ("cryptography", "securesystemslib"),
    "timm": ("timm",),
    "demo": (*_LOCAL, "gcp_storage_emulator", "requests", "sklearn"),
}


def cpus() -> float:
    """Return the CPUs (hardware threads), or the fraction of their time, for this process."""
    return min([float(len(_allowed())), *_quotas()])


def cores() -> int:
    """Return the physical cores for this process, at least one."""
    cpu_lists = [_words(Path(TOPOLOGY.format(cpu))) for cpu in _allowed()]
    first_threads = {words[0] for words in cpu_lists if words}
    physical = len(first_threads) or len(cpu_lists)  # not each system has the files
    return max(1, int(min(physical, cpus())))


def threads(processes: int = 1) -> int:
    """Return the threads to compute with in each of some equal processes."""
    return max(1, cores() // processes)


def memory() -> int:
    """Return the bytes of memory for this process and those that share its limits."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups():
        for name in MEMORY:
            limits += [int(word) for word in _words(group / name) if word != "max"]
    return min(limits)


def require(extra: str, what: str = "this") -> None:
    """Check that the packages of an extra are installed; InputError says how to install all."""
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise InputError(
                f"{what} needs {module}, which is not installed: pip install 'kfp-ddp[{extra}]', "
                f"or in a checkout pip install '.[{extra}]'"
            )


def _allowed() -> set[int]:
    count = os.cpu_count() or 1
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(count))


def _quotas() -> Iterator[float]:
    """Yield the CPUs that each cgroup grants: quota by period, where 'max' and -1 are no limit."""
    for group in _groups():
        version_1 = [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        version_2 = _words(group / "cpu.max")
        for words in (version_1, version_2):
            if len(words) == 2 and words[0].isdecimal():
                yield int(words[0]) / int(words[1])


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of those above, of versions 1 and 2."""
    lines = ["0::/"]
    with suppress(OSError):
        lines = OWN_GROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in (controllers, *(controllers or "unified").split(",")):
            root = CGROUPS / name
            group = root / path.strip("/")
            # A container may show its own group as the root, under the host's path.
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    yield folder


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().split()
    return []
