"""Fields of Kubernetes objects, any of which may be missing or null."""

from kfp_ddp.k8s.api import Object


def label(item: Object, name: str) -> str:
    """Return a label; '' for none."""
    return str((item["metadata"].get("labels") or {}).get(name, ""))


def annotation(item: Object, name: str) -> str:
    """Return an annotation; '' for none."""
    return str((item["metadata"].get("annotations") or {}).get(name, ""))


def phase(item: Object) -> str:
    """Return the phase; '' for none yet."""
    return str((item.get("status") or {}).get("phase") or "")


def has_ended(pod: Object) -> bool:
    """Return whether all containers of a pod have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def conditions(item: Object) -> list[Object]:
    """Return the conditions."""
    return (item.get("status") or {}).get("conditions") or []


def condition(item: Object, kind: str, status: str = "True") -> Object | None:
    """Return the condition of a type, if it has this status."""
    matches = (c for c in conditions(item) if c["type"] == kind and c["status"] == status)
    return next(matches, None)


def containers(pod: Object) -> list[Object]:
    """Return the statuses of a pod's containers."""
    return (pod.get("status") or {}).get("containerStatuses") or []


def every_container(pod: Object) -> list[Object]:
    """Return the statuses of a pod's init containers, then of its containers."""
    return [*((pod.get("status") or {}).get("initContainerStatuses") or []), *containers(pod)]
