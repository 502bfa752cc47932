"""Specifications of jobs made by chance, of everything that LaunchSpec takes for good."""

import random
import string
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec

UNITS = ("m", "", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti", "P", "Pi", "E", "Ei")
TEXT = string.printable + "äß∑模$$()`'\"\\{}%"
INSIDE = string.ascii_letters + string.digits + "-_."


def text(chance: random.Random, most: int = 30) -> str:
    """Any text of that many characters at most."""
    return "".join(chance.choices(TEXT, k=chance.randint(0, most)))


def label(chance: random.Random) -> str:
    """What a label's value may be."""
    inside = "".join(chance.choices(INSIDE, k=chance.randint(0, 61)))
    return chance.choice(("", f"a{inside}9", "x"))


def name(chance: random.Random, most: int = 63) -> str:
    """The name of an object."""
    inside = "".join(chance.choices(string.ascii_lowercase + string.digits + "-", k=most - 2))
    return f"a{inside[: chance.randint(0, most - 2)]}0"


def key(chance: random.Random) -> str:
    """The key of a label, annotation or resource, with a domain or without."""
    return chance.choice(("", f"{name(chance, 20)}.com/")) + (label(chance) or "x")


def quantity(chance: random.Random) -> str:
    """A quantity of a resource, in any of its spellings."""
    number = chance.choice((str(chance.randint(0, 999)), f"{chance.random() * 100:.3f}"))
    return number + chance.choice(UNITS)


def variable(chance: random.Random) -> str:
    """The name of a variable."""
    return chance.choice("_aZ-.") + "".join(chance.choices(INSIDE, k=chance.randint(0, 20)))


def fields(chance: random.Random, kind: str) -> dict[str, Any]:
    """Settings of a job by name, each as often there as not."""

    def some(make: Any) -> list[Any]:
        return [make(chance) for _ in range(chance.randint(0, 3))]

    given: dict[str, Any] = {
        "nodes": chance.randint(1, 5),
        "nproc_per_node": chance.randint(0, 9),
        "gpus_per_node": chance.randint(0, 8),
        "gpu_resource": chance.choice(("nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.5gb")),
        "shm_size": chance.choice(("", quantity(chance))),
        "env": {variable(chance): text(chance) for _ in range(chance.randint(0, 4))},
        "env_from_secrets": some(name),
        "claims": {f"/c{i}": each for i, each in enumerate(some(name))},
        "nccl_debug": chance.choice(LaunchSpec.choices("nccl_debug")),
        "nccl_socket_interface": chance.choice(("", "eth0")),
        "nccl_infiniband": chance.choice(LaunchSpec.choices("nccl_infiniband")),
        "nccl_timeout_minutes": chance.choice((0, 0.5, 90)),
        "host_network": chance.random() < 0.5,
        "metrics_port": chance.choice((0, 9400)),
        "istio": chance.random() < 0.5,
        "labels": {key(chance): label(chance) for _ in range(chance.randint(0, 3))},
        "annotations": {key(chance): text(chance) for _ in range(chance.randint(0, 3))},
        "capabilities": chance.sample(["IPC_LOCK", "SYS_NICE", "NET_RAW"], chance.randint(0, 3)),
        "node_selector": {key(chance): label(chance) for _ in range(chance.randint(0, 2))},
        "spot": chance.choice(LaunchSpec.choices("spot")),
        "priority_class": chance.choice(("", name(chance))),
        "scheduler": chance.choice(LaunchSpec.choices("scheduler")),
        "image_pull_secrets": some(name),
        "image_pull_policy": chance.choice(LaunchSpec.choices("image_pull_policy")),
        "service_account": chance.choice(("", name(chance))),
        "run_as_user": chance.choice((-1, 0, 1000)),
        "fs_group": chance.choice((-1, 0, 1000)),
        "non_root": chance.random() < 0.5,
        "grace_seconds": chance.randint(1, 999),
        "restart_policy": chance.choice(LaunchSpec.choices("restart_policy")),
        "backoff_limit": chance.randint(-1, 3),
        "clean_pod_policy": chance.choice(LaunchSpec.choices("clean_pod_policy")),
        "ttl_seconds": chance.randint(-1, 99),
        "deadline_minutes": chance.choice((0, 0.01, 60)),
        "elastic": chance.choice(("", "1:5", "5:5")),
        "init_containers": some(lambda _: {"command": ["true"]}),
        "topology_spread": some(
            lambda _: {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ),
        "cpu": quantity(chance),
        "memory": quantity(chance),
        "cpu_request": quantity(chance),
        "memory_request": quantity(chance),
        "rdma_resource": chance.choice(("", "rdma/hca")),
        "args": [text(chance)],
    }
    given["init_containers"] = [
        {"name": f"init-{i}", **each} for i, each in enumerate(given["init_containers"])
    ]
    if given["topology_spread"]:
        given["topology_spread"] = given["topology_spread"][:1]
    no_place = {each.setting for each in KINDS[kind].unsupported}
    chosen = {n: v for n, v in given.items() if n not in no_place and chance.random() < 0.5}
    return {"kind": kind, "image": "ghcr.io/you/trainer:1.0", "command": ["python3"], **chosen}


def specification(chance: random.Random, kind: str) -> LaunchSpec:
    """The first of some specifications made by chance that LaunchSpec does not refuse."""
    while True:
        try:
            return LaunchSpec.create(**fields(chance, kind))
        except InputError:
            continue
