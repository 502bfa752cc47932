"""Puts objects into a cluster: rehearsed by the server first, so that a refusal leaves nothing."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kfp_ddp.checks.doctor.finding import items
from kfp_ddp.checks.doctor.storage import CLASSES, is_default
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.settings import hint
from kfp_ddp.core.text import one_line
from kfp_ddp.install.manifests import OF_CLUSTER, Wanted
from kfp_ddp.k8s.api import Api, ApiError, Object, core, custom
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.k8s.quantity import QUANTITY

State = Literal["made", "changed", "unchanged", "left", "refused"]
REHEARSAL = {"dryRun": "All"}
SAID = ("rules", "roleRef", "subjects", "spec")
"""The parts of an object that are compared and changed."""
KEPT = ("PersistentVolumeClaim", "Job")
"""Kinds of which one that is there stays as it is: it cannot be changed, and may hold data."""
# Drivers whose volumes hold one node's file system, whatever a claim asks for.
OF_ONE_NODE = (
    *("pd.csi.storage.gke.io", "ebs.csi.aws.com", "disk.csi.azure.com", "kubernetes.io/gce-pd"),
    *("rancher.io/local-path", "kubernetes.io/aws-ebs", "kubernetes.io/azure-disk"),
)
COUNTED = tuple(
    f"{part}{name}" for part in ("", "requests.", "limits.") for name in ("cpu", "memory")
)


@dataclass(frozen=True)
class Done:
    """What became of one object."""

    kind: str
    name: str
    state: State
    said: str = ""


def look(api: Api, wanted: Wanted) -> None:
    """See that there is such a namespace and storage class.

    Raises:
        InputError: for one that is not there, or that makes no volumes of the access mode, and for
            a size that is none.
    """
    if not wanted.size or not re.match(QUANTITY, wanted.size):
        raise InputError(f"--size {wanted.size} cannot be used: it should be such as 500Gi or 1Ti")
    try:
        api.call("GET", f"/api/v1/namespaces/{wanted.namespace}")
    except ApiError as error:
        if error.status == 404:
            there = [each["metadata"]["name"] for each in items(api, "/api/v1/namespaces") or ()]
            near = hint(wanted.namespace, there) or "; make it, or give another by -n"
            raise InputError(f"there is no namespace {wanted.namespace}{near}") from None
        if error.status != 403:
            raise
    classes = items(api, CLASSES) if wanted.claims else None
    if classes is not None:
        _look_at_class(wanted, classes)


def _look_at_class(wanted: Wanted, classes: Sequence[Object]) -> None:
    known = {each["metadata"]["name"]: each for each in classes}
    default = [name for name, each in known.items() if is_default(each)]
    name = wanted.storage_class or next(iter(default), "")
    listed = ", ".join(known) or "none: install a CSI driver"
    if not name:
        raise InputError(f"no storage class is the default; give --storage-class, one of {listed}")
    if name not in known:
        near = hint(name, [*known]) or f"; there are {listed}"
        raise InputError(f"there is no storage class {name}{near}")
    driver = known[name].get("provisioner")
    if wanted.access_mode == "ReadWriteMany" and driver in OF_ONE_NODE:
        raise InputError(
            f"storage class {name} ({driver}) makes volumes of one node only; give a class of "
            "NFS, Filestore, EFS or CephFS, or --access-mode ReadWriteOnce for runs on one node"
        )


def apply(api: Api, objects: Sequence[Object], *, only_rehearse: bool = False) -> list[Done]:
    """Make or change these objects, once the server has said that it would take all of them.

    What belongs to the whole cluster is optional: where it is refused, it is told and left out.

    Raises:
        InputError: when another one is refused; then nothing has been made.
    """
    new: set[tuple[str, str]] = set()
    done, taken = [], []
    for each in objects:
        found = _put(api, each, new, rehearsal=True)
        if found.state == "refused" and each["kind"] not in OF_CLUSTER:
            raise InputError(
                f"{found.kind} {found.name} is refused: {found.said}; nothing was made"
            )
        done.append(found)
        if found.state == "made":
            new.add((found.kind, found.name))
        if found.state in ("made", "changed"):
            taken.append(each)
    if not only_rehearse:
        for each in taken:
            if (found := _put(api, each, set(), rehearsal=False)).state == "refused":
                done = [found if _of(one) == _of(found) else one for one in done]
    return done


def _of(done: Done) -> tuple[str, str]:
    return done.kind, done.name


def _put(api: Api, wanted: Object, new: set[tuple[str, str]], *, rehearsal: bool) -> Done:
    """Make or change one object; a binding of a role that is to be made cannot be rehearsed."""
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    query = REHEARSAL if rehearsal else None
    try:
        there = _get(api, wanted)
        if there is None:
            role = wanted.get("roleRef", {})
            if not rehearsal or (role.get("kind"), role.get("name")) not in new:
                api.call("POST", path(wanted), wanted, query)
            return Done(kind, name, "made")
        if kind in KEPT:
            return Done(kind, name, "left", _is(there))
        change = {part: wanted[part] for part in SAID if part in wanted}
        after = api.call("PATCH", path(wanted, name), change, REHEARSAL)
        if all(after.get(part) == there.get(part) for part in SAID):
            return Done(kind, name, "unchanged")
        if not rehearsal:
            api.call("PATCH", path(wanted, name), change)
        return Done(kind, name, "changed")
    except ApiError as error:
        if error.status not in (400, 403, 404, 409, 422):
            raise
        hint = "; run it as somebody who may" if error.status == 403 else ""
        return Done(kind, name, "refused", one_line(error.message) + hint)


def _get(api: Api, wanted: Object) -> Object | None:
    try:
        return api.call("GET", path(wanted, wanted["metadata"]["name"]))
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def _is(there: Object) -> str:
    """In words what a claim is that stays as it is."""
    if there["kind"] != "PersistentVolumeClaim":
        return ""
    spec = there["spec"]
    modes = ", ".join(spec.get("accessModes") or ())
    size = spec["resources"]["requests"]["storage"]
    return f"{size} of {spec.get('storageClassName') or 'no class'}, {modes}"


def path(document: Object, name: str = "") -> str:
    """Where the API has an object of this kind, or all of them."""
    version, plural = document["apiVersion"], document["kind"].lower() + "s"
    namespace = document["metadata"].get("namespace")
    if not namespace:
        return f"/apis/{version}/{plural}" + (f"/{name}" if name else "")
    if "/" not in version:
        return core(namespace, plural, name)
    return custom(version, namespace, plural, name)


def lacks_limits(api: Api, namespace: str) -> bool:
    """Whether a quota of CPU or memory would refuse the containers that say nothing."""
    quotas = items(api, core(namespace, "resourcequotas")) or ()
    counted = any(name in each["spec"].get("hard", {}) for each in quotas for name in COUNTED)
    return counted and not items(api, core(namespace, "limitranges"))


def wait(api: Api, job: Object, seconds: float = 300) -> Iterator[str]:
    """What keeps a job from its end, each time it is another thing; returns when it is done.

    Raises:
        JobError: when it fails or takes longer.
    """
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    end, told = time.monotonic() + seconds, ""
    describe = f"kubectl describe -n {namespace} job/{name} says why"
    while time.monotonic() < end:
        now = api.call("GET", path(job, name), retry=True)
        if condition(now, "Complete"):
            return
        if condition(now, "Failed"):
            raise JobError(f"{name} failed, so volumes may not be writable; {describe}")
        pods = api.call("GET", core(namespace, "pods"), None, {"labelSelector": f"job-name={name}"})
        waiting = "; ".join(r.text for pod in pods["items"] if (r := waiting_reason(pod)))
        if waiting and waiting != told:
            told = waiting
            yield waiting
        time.sleep(1)
    raise JobError(f"{name} is not over after {seconds:g} s{told and f' ({told})'}; {describe}")
