"""The nodes of the cluster."""

from collections.abc import Sequence

from kfp_ddp.k8s.api import Api, Object


def schedulable(api: Api) -> list[Object]:
    """Return the nodes that accept pods; raises ApiError without the right to list them."""

    def listed() -> list[Object]:
        return [node for page in api.pages("/api/v1/nodes") for node in page["items"] or ()]

    nodes = api.retry(listed, also=(410,))  # an expired list is read again
    return [node for node in nodes if not node["spec"].get("unschedulable")]


def gpus(nodes: Sequence[Object]) -> dict[str, list[int]]:
    """Return the counts of each GPU resource on the nodes that have any, the most first."""
    counts: dict[str, list[int]] = {}
    for node in nodes:
        for name, count in (node["status"].get("allocatable") or {}).items():
            if str(count).isdecimal() and int(count):
                counts.setdefault(name, []).append(int(count))
    return {name: sorted(counts[name], reverse=True) for name in counts}
