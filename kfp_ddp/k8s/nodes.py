"""What the cluster's nodes have."""

from collections.abc import Sequence

from kfp_ddp.k8s.api import Api, Object


def schedulable(api: Api) -> list[Object]:
    """The nodes that pods may be put on.

    Raises:
        ApiError: this account may not look.
    """

    def listed() -> list[Object]:
        return [node for page in api.pages("/api/v1/nodes") for node in page["items"] or ()]

    found = api.retry(listed, also=(410,))  # too old meanwhile, so listed anew
    return [node for node in found if not node["spec"].get("unschedulable")]


def gpus(nodes: Sequence[Object]) -> dict[str, list[int]]:
    """How many of each GPU resource the nodes have that have any, the most first."""
    counts: dict[str, list[int]] = {}
    for node in nodes:
        for name, count in (node["status"].get("allocatable") or {}).items():
            if str(count).isdecimal() and int(count):
                counts.setdefault(name, []).append(int(count))
    return {name: sorted(counts[name], reverse=True) for name in counts}
