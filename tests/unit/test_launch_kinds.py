"""The table of kinds: what each has no place for, and how it starts a script."""

import typing
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import payload
from kfp_ddp.jobs.kinds import KINDS, KindName, pod
from kfp_ddp.jobs.launch_spec import LaunchSpec

SPEC: dict[str, Any] = {"image": "ghcr.io/you/trainer:1.0", "command": ("python3", "train.py")}

# What each kind has no place for, with a value of it: a setting that would do nothing is refused.
NOT_ELASTIC = ("elastic", "1:2", "elastic=1:2: a {kind} cannot be elastic; use a pytorchjob")
NO_RUNTIME = ("runtime", "mine", "runtime='mine': a {kind} has none, a trainjob has")
IN_THE_RUNTIME = (
    "{name} cannot be set on a TrainJob: put it into the runtime 'torch-distributed', "
    "or use a PyTorchJob"
)
UNSUPPORTED: dict[str, list[tuple[str, Any, str]]] = {
    "pytorchjob": [NO_RUNTIME],
    "tfjob": [
        NOT_ELASTIC,
        NO_RUNTIME,
        ("nproc_per_node", 2, "nproc_per_node=2: a tfjob runs one process in each pod"),
        ("nccl_timeout_minutes", 5.0, "nccl_timeout_minutes=5.0: "),
    ],
    "mpijob": [NOT_ELASTIC, NO_RUNTIME],
    "trainjob": [
        NOT_ELASTIC,
        ("host_network", True, IN_THE_RUNTIME),
        ("init_containers", [{"name": "fetch"}], IN_THE_RUNTIME),
        ("topology_spread", [{"topologyKey": "zone"}], IN_THE_RUNTIME),
        ("priority_class", "high", IN_THE_RUNTIME),
        ("image_pull_policy", "Always", IN_THE_RUNTIME),
        ("restart_policy", "OnFailure", IN_THE_RUNTIME),
        ("backoff_limit", 0, IN_THE_RUNTIME),
        ("scheduler", "volcano", IN_THE_RUNTIME),
        ("scheduler", "coscheduling", IN_THE_RUNTIME),
        ("scheduler", "runai", IN_THE_RUNTIME),
        ("env_from_secrets", ["secret"], IN_THE_RUNTIME),
        ("clean_pod_policy", "All", IN_THE_RUNTIME),
        ("ttl_seconds", 5, IN_THE_RUNTIME),
    ],
}


@pytest.mark.parametrize("kind", list(UNSUPPORTED))
def test_what_a_kind_cannot_do_is_refused_by_its_row(kind: str) -> None:
    for name, value, says in UNSUPPORTED[kind]:
        with pytest.raises(InputError) as error:
            LaunchSpec.create(**SPEC, kind=kind, **{name: value})
        assert says.format(kind=kind, name=name) in str(error.value)
        assert "\n" not in str(error.value)
    refused = {name for name, _, _ in UNSUPPORTED[kind]}
    assert {each.setting for each in KINDS[kind].unsupported} == refused
    assert LaunchSpec.create(**SPEC, kind=kind, scheduler="kueue").kind == kind


def test_every_kind_has_a_row_and_a_manifest() -> None:
    assert {kind.name for kind in KINDS.values()} == set(typing.get_args(KindName))


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
def test_a_script_is_started_as_its_kind_does(
    kind: str, starts: list[str], variables: set[str]
) -> None:
    spec = LaunchSpec.create(image="a:1", script="print()", kind=kind)
    assert pod.command(spec, "map") == [*starts, "/etc/kfp-ddp/script.py"]
    without_map = pod.command(spec, "")
    assert without_map[: len(starts)] == starts
    assert without_map[-2:] == [
        "-c",
        payload.RUN_FROM_ENV.format(variable="KFP_DDP_SCRIPT", file="script.py"),
    ]
    assert {each["name"] for each in pod.environment(spec, "map")} == {pod.NODE, *variables}
