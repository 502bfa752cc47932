"""Fields of Kubernetes objects, any of which may be missing or null, and patterns of values."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from kfp_ddp.k8s.api import Object


def part(item: Object, *names: str) -> Object:
    """Return the part of an object below these names; {} if one is missing or null."""
    for name in names:
        item = item.get(name) or {}
    return item


def text_of(item: Object, name: str) -> str:
    """Return a field as text; '' if it is missing or null."""
    return str(item.get(name) or "")


def number_of(item: Object, name: str) -> int:
    """Return a field as a number; 0 if it is missing or null."""
    return int(item.get(name) or 0)


def list_of(item: Object, name: str) -> list[Object]:
    """Return a list of objects; [] if it is missing or null."""
    return item.get(name) or []


def label(item: Object, name: str) -> str:
    """Return a label; '' for none."""
    return str(part(item, "metadata", "labels").get(name, ""))


def annotation(item: Object, name: str) -> str:
    """Return an annotation; '' for none."""
    return str(part(item, "metadata", "annotations").get(name, ""))


def phase(item: Object) -> str:
    """Return the phase; '' for none yet."""
    return text_of(part(item, "status"), "phase")


def has_ended(pod: Object) -> bool:
    """Return whether all containers of a pod have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def conditions(item: Object) -> list[Object]:
    """Return the conditions."""
    return list_of(part(item, "status"), "conditions")


def condition(item: Object, kind: str, status: str = "True") -> Object | None:
    """Return the condition of a type, if it has this status."""
    for entry in conditions(item):
        if entry["type"] == kind and entry["status"] == status:
            return entry
    return None


def container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of a pod's containers."""
    return list_of(part(pod, "status"), "containerStatuses")


def init_container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of a pod's init containers."""
    return list_of(part(pod, "status"), "initContainerStatuses")


def all_container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of a pod's init containers, then of its containers."""
    return [*init_container_statuses(pod), *container_statuses(pod)]


def select(item: Object, names: Iterable[str]) -> Object:
    """Return the fields of these names that an object has."""
    return {name: item[name] for name in names if name in item}


def missing_field(sent: Any, kept: Any, path: str) -> str:
    """Return the path of the first field of `sent` that `kept` lacks, below `path`; '' for none.

    A field that is empty does not count: programs in Go leave it out.
    """
    if not sent:
        return ""
    if not kept:
        return path
    if isinstance(sent, list):
        sent = dict(enumerate(sent))
        kept = dict(enumerate(kept))
    if not isinstance(sent, dict):
        return ""
    below = (missing_field(sent[name], kept.get(name), f"{path}.{name}") for name in sent)
    return next(filter(None, below), "")


def allocatable(nodes: Sequence[Object]) -> dict[str, list[int]]:
    """Return the counts of each resource on the nodes that have any, the most first."""
    counts: dict[str, list[int]] = {}
    for node in nodes:
        for name, count in part(node, "status", "allocatable").items():
            # Memory has a unit: it is no count.
            if str(count).isdecimal() and int(count):
                counts.setdefault(name, []).append(int(count))
    return {name: sorted(counts[name], reverse=True) for name in counts}


QUANTITY = r"^$|^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
AMOUNT = QUANTITY.removeprefix("^$|")
_UNITS = {"m": Fraction(1, 1000)} | {
    unit + suffix: Fraction(base**power)
    for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_UNITS["Ki"] = _UNITS.pop("ki")


def parse_quantity(quantity: str) -> Fraction:
    """Return a quantity as a number of CPUs, bytes or pieces."""
    number = quantity.rstrip("mkKMGTPEi")
    return Fraction(number) * _UNITS.get(quantity.removeprefix(number), 1)


# Kubernetes reports errors in a pod only when an operator creates one: these are checked before.
NAME = r"^$|^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
LABEL = r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
SIZE = r"^(?=.*[1-9])[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)$"
CLAIM = NAME.removeprefix("^$|")[:-1] + "(:ro)?$"
IMAGE = r"^[^\s]+$"
MOUNT = r"^/[^:]+$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
CAPABILITY = r"^[A-Z][A-Z0-9_]*$"
KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
RESOURCE = f"^$|{KEY}"

DESCRIPTIONS = {
    QUANTITY: "a quantity such as 500m, 4 or 16Gi",
    NAME: "a name of small letters, digits, '-' and '.'",
    LABEL: "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    NAMESPACE: "a name of at most 63 small letters, digits and '-'",
    SIZE: "an amount with a unit of Kubernetes, such as 500Gi or 1Ti",
    CLAIM: "the name of a claim, or name:ro",
    IMAGE: "the name of an image, without spaces",
    MOUNT: "an absolute path without ':'",
    VARIABLE: "the name of a variable: letters, digits, '-', '_' and '.'",
    CAPABILITY: "the name of a capability of Linux without CAP_, such as IPC_LOCK",
    KEY: "the key of a label or resource, such as zone or example.com/zone",
    RESOURCE: "the name of a resource, such as rdma/hca",
}
