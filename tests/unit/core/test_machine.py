"""The limits of the machine and its containers, and the environment of another Python."""

import os
from pathlib import Path

import pytest

from kfp_ddp.core import machine
from kfp_ddp.jobs.local import environment
from kfp_ddp.plan.choice import this_machine

GB = 1 << 30
V1 = "2:cpuset:/\n5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/x\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "gigabytes"),
    [
        ("0::/", {"cpu.max": "150000 100000", "memory.max": f"{2 * GB}"}, 1.5, 2),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 4, 0),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5, 0),
        ("0::/a/b", {"a/memory.max": f"{GB}", "a/b/memory.high": f"{3 * GB}"}, 4, 1),
        ("0::/../host/path", {"cpu.max": "200000 100000"}, 2, 0),
        ("1:cpu:/\n0::/pod", {"unified/pod/cpu.max": "100000 100000"}, 1, 0),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "1"}, 4, 0),
        (V1, {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25, 0),
        (V1, {"memory/docker/a/memory.limit_in_bytes": f"{GB}"}, 4, 1),
        ("", {"cpu.max": "50000 100000"}, 0.5, 0),
    ],
)
def test_the_least_limit_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    cpus: float,
    gigabytes: int,
) -> None:
    own = tmp_path / "own"
    if groups:
        own.write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", own)
    monkeypatch.setattr(machine, "_allowed", lambda: set(range(4)))
    monkeypatch.setattr(machine, "TOPOLOGY", "/none/{}")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.cpus() == cpus
    assert machine.memory() == (gigabytes * GB or physical)
    assert this_machine().cores == machine.cores() == machine.threads() == max(1, int(cpus))
    assert this_machine().memory_gb == machine.memory() / GB
    assert machine.threads(3) == 1


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        *((name, "3", None) for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PET_NNODES")),
        *((name, "3", None) for name in ("SLURM_NTASKS", "PMI_RANK", "TORCHELASTIC_ERROR_FILE")),
        *((name, "eth7", None) for name in ("GLOO_SOCKET_IFNAME", "KFP_DDP_RESTARTS")),
        ("PYTHONPATH", f"{os.pathsep}/a{os.pathsep}{os.pathsep}/b", f"/a{os.pathsep}/b"),
        ("PYTHONPATH", os.pathsep, None),
        ("PYTHONSAFEPATH", "", "1"),
        ("NCCL_DEBUG", "INFO", "INFO"),
        ("MASTERPIECE", "x", "x"),
    ],
)
def test_child_is_no_rank_of_others_and_does_not_import_from_here(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, seen: str | None
) -> None:
    monkeypatch.setenv(name, value)
    assert environment({}).get(name) == seen
    assert environment({name: "mine"})[name] == "mine"
