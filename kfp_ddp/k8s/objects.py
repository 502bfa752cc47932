"""What objects of Kubernetes say of themselves; any part of them may be missing, or null."""

from kfp_ddp.k8s.api import Object


def label(item: Object, name: str) -> str:
    """A label; '' for none."""
    return str((item["metadata"].get("labels") or {}).get(name, ""))


def annotation(item: Object, name: str) -> str:
    """An annotation; '' for none."""
    return str((item["metadata"].get("annotations") or {}).get(name, ""))


def phase(item: Object) -> str:
    """Its phase; '' where it tells none yet."""
    return str((item.get("status") or {}).get("phase") or "")


def has_ended(pod: Object) -> bool:
    """Whether no container of a pod runs, or will."""
    return phase(pod) in ("Succeeded", "Failed")


def conditions(item: Object) -> list[Object]:
    """All that its status lists."""
    return (item.get("status") or {}).get("conditions") or []


def condition(item: Object, kind: str, status: str = "True") -> Object | None:
    """The condition of a kind, if it has this status."""
    of_kind = (each for each in conditions(item) if each["type"] == kind)
    return next((each for each in of_kind if each["status"] == status), None)


def containers(pod: Object) -> list[Object]:
    """The statuses of a pod's containers."""
    return (pod.get("status") or {}).get("containerStatuses") or []


def every_container(pod: Object) -> list[Object]:
    """Those of its init containers, and then those of its containers."""
    return [*((pod.get("status") or {}).get("initContainerStatuses") or []), *containers(pod)]
