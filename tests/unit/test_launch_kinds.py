"""Kinds of jobs: the settings that each does not support, and how it starts a script."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import payload
from kfp_ddp.jobs.kinds import KINDS, pod
from kfp_ddp.jobs.launch_spec import LaunchSpec

SPEC: dict[str, Any] = {"image": "ghcr.io/you/trainer:1.0", "command": ("python3", "train.py")}

# A value of each setting that some kind does not support.
OTHER: dict[str, Any] = {
    "elastic": "1:2",
    "runtime": "mine",
    "nproc_per_node": 2,
    "nccl_timeout_minutes": 5.0,
    "host_network": True,
    "init_containers": [{"name": "fetch"}],
    "topology_spread": [{"topologyKey": "zone"}],
    "priority_class": "high",
    "image_pull_policy": "Always",
    "restart_policy": "OnFailure",
    "backoff_limit": 0,
    "scheduler": "volcano",
    "env_from_secrets": ["secret"],
    "clean_pod_policy": "All",
    "ttl_seconds": 5,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_unsupported_setting_is_refused(kind: str) -> None:
    """A setting without effect would go unnoticed."""
    unsupported = {item.setting for item in KINDS[kind].unsupported}
    for name, value in OTHER.items():
        fields = {**SPEC, "kind": kind, name: value}
        if name in unsupported:
            with pytest.raises(InputError, match=name):
                LaunchSpec.create(**fields)
        else:
            assert LaunchSpec.create(**fields).kind == kind
    assert unsupported <= OTHER.keys()
    assert LaunchSpec.create(**SPEC, kind=kind, scheduler="kueue").kind == kind


@pytest.mark.parametrize(
    ("kind", "starts", "variables"),
    [
        ("pytorchjob", ["python3", "-m", "torch.distributed.run"], {"PET_RDZV_CONF"}),
        (
            "trainjob",
            ["python3", "-m", "torch.distributed.run"],
            {"PYTHONUNBUFFERED", "PET_RDZV_CONF"},
        ),
        ("tfjob", ["python3"], {"PYTHONUNBUFFERED"}),
        (
            "mpijob",
            ["mpirun", "python3"],
            {"PYTHONUNBUFFERED", "OMPI_MCA_hwloc_base_binding_policy"},
        ),
    ],
)
def test_how_each_kind_starts_a_script(kind: str, starts: list[str], variables: set[str]) -> None:
    spec = LaunchSpec.create(image="a:1", script="print()", kind=kind)
    assert pod.command(spec, "map") == [*starts, "/etc/kfp-ddp/script.py"]
    without_map = pod.command(spec, "")
    assert without_map[: len(starts)] == starts
    assert without_map[-2:] == [
        "-c",
        payload.RUN_FROM_ENV.format(variable="KFP_DDP_SCRIPT", file="script.py"),
    ]
    assert {entry["name"] for entry in pod.environment(spec, "map")} == {pod.NODE, *variables}
