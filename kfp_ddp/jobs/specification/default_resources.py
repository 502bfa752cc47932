"""What the pods of a job ask of their nodes where nobody has said it."""

from typing import NamedTuple

from kfp_ddp.jobs.specification.launch_spec import LaunchSpec


class Share(NamedTuple):
    """A number and its unit."""

    number: int
    unit: str = ""

    def times(self, count: int) -> str:
        """So many of it, as Kubernetes writes quantities."""
        return f"{self.number * count}{self.unit}"


# The smallest machines that clouds attach a GPU to have 4 CPUs and 15 GiB, some of it taken.
PER_GPU = {
    "limits": {"cpu": Share(8), "memory": Share(32, "Gi")},
    "requests": {"cpu": Share(2), "memory": Share(8, "Gi")},
}
PER_RANK_ON_CPUS = {
    "limits": {"cpu": Share(4), "memory": Share(4, "Gi")},
    "requests": {"cpu": Share(100, "m"), "memory": Share(512, "Mi")},
}
INIT_CONTAINER = {
    "limits": {"cpu": "1", "memory": "1Gi"},
    "requests": {"cpu": "50m", "memory": "64Mi"},
}
"""Of an init container that says nothing of its own."""


def default_resources(spec: LaunchSpec) -> dict[str, dict[str, str]]:
    """Limits and requests of each pod for the CPU and the memory of which nothing was set.

    A namespace with a ResourceQuota takes no pod that lacks one of them. Where a limit or a request
    was set, the other is left to Kubernetes: a request alone is how to have no limit.

    Returns:
        {"limits": {…}, "requests": {…}} by resource, as Kubernetes writes them; {} where both CPU
        and memory were set.
    """
    gpus = spec.gpus()
    shares, count = (PER_GPU, gpus) if gpus else (PER_RANK_ON_CPUS, spec.processes())
    asked = spec.asked()
    missing = [
        name for name in ("cpu", "memory") if not any(name in part for part in asked.values())
    ]
    if not missing:
        return {}
    return {part: {name: of[name].times(count) for name in missing} for part, of in shares.items()}
