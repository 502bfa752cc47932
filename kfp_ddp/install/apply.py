"""Make and delete the objects of an installation.

New ones are first sent as a dry run, so that a refusal changes nothing.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from kfp_ddp.checks.access import QUOTAS
from kfp_ddp.checks.finding import items
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import one_line
from kfp_ddp.install.manifests import CLUSTER_KINDS, PART_OF, Installation, every_object
from kfp_ddp.jobs.shipping.own_package import MAPS, has_source
from kfp_ddp.k8s.api import Api, ApiError, Object, Refused, poll
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.pods import waiting_reason
from kfp_ddp.k8s.resource import CONFIG_MAPS, PODS, Resource

State = Literal["made", "changed", "unchanged", "left", "refused", "deleted"]
DRY_RUN = {"dryRun": "All"}
PARTS = ("rules", "roleRef", "subjects", "spec", "data", "binaryData")
"""Parts of an object that are compared and changed."""
IMMUTABLE = ("PersistentVolumeClaim", "Job")
"""Kinds of which an existing object is not changed."""
QUOTA_RESOURCES = (
    *("cpu", "requests.cpu", "limits.cpu"),
    *("memory", "requests.memory", "limits.memory"),
)
OURS = "app.kubernetes.io/part-of=kfp-ddp"
BINDINGS = Resource("rbac.authorization.k8s.io/v1", "clusterrolebindings", namespaced=False)


class Done(NamedTuple):
    """Result for one object, also in JSON."""

    kind: str
    name: str
    state: State
    message: str = ""


def apply(api: Api, objects: Sequence[Object], *, dry_run: bool = False) -> list[Done]:
    """Create or change objects if a dry run accepts all; a refused cluster-wide one is skipped."""
    new: set[tuple[str, str]] = set()
    done = []
    accepted = []
    for target in objects:
        result = _put(api, target, new, dry_run=True)
        if result.state == "refused" and target["kind"] not in CLUSTER_KINDS:
            raise InputError(
                f"{result.kind} {result.name} is refused: {result.message}; nothing was created"
            )
        done.append(result)
        if result.state == "made":
            new.add(result[:2])
        if result.state in ("made", "changed"):
            accepted.append(target)
    if dry_run:
        return done
    for target in accepted:
        result = _put(api, target, set(), dry_run=False)
        if result.state == "refused":
            # In place of the result of the dry run for the same kind and name.
            done = [result if first[:2] == result[:2] else first for first in done]
    return done


def _put(api: Api, target: Object, new: set[tuple[str, str]], *, dry_run: bool) -> Done:
    """Create or change one object; the binding of a new role cannot be sent as a dry run."""
    kind = target["kind"]
    name = target["metadata"]["name"]
    try:
        existing = api.get(resource_of(target), name)
        if existing is None:
            role = target.get("roleRef", {})
            if not dry_run or (role.get("kind"), role.get("name")) not in new:
                api.create(resource_of(target), target, query=DRY_RUN if dry_run else None)
            return Done(kind, name, "made", _describe(target))
        if kind in IMMUTABLE:
            return Done(kind, name, "left", _describe(existing))
        return _change(api, target, existing, dry_run=dry_run)
    except ApiError as error:
        if error.status not in (400, 403, 404, 409, 422):
            raise
        remedy = "; run it with an account that may" if error.status == 403 else ""
        return Done(kind, name, "refused", one_line(error.message) + remedy)


def _change(api: Api, target: Object, existing: Object, *, dry_run: bool) -> Done:
    """Change an object if the server would then store something else."""
    kind = target["kind"]
    name = target["metadata"]["name"]
    resource = resource_of(target)
    change = {part: target[part] for part in PARTS if part in target}
    after = api.patch(resource, name, change, query=DRY_RUN)
    if all(after.get(part) == existing.get(part) for part in PARTS):
        return Done(kind, name, "unchanged")
    if not dry_run:
        api.patch(resource, name, change)
    return Done(kind, name, "changed", _differs(existing, target))


def _differs(existing: Object, target: Object) -> str:
    """Return what is worth a word of a change."""
    if target["kind"] == "ConfigMap" and not has_source(existing):
        return "it had another source than its name"
    return ""


def _describe(existing: Object) -> str:
    """Return size, class and modes of a PVC; '' for another object."""
    if existing["kind"] != "PersistentVolumeClaim":
        return ""
    spec = existing["spec"]
    modes = ", ".join(spec.get("accessModes") or ())
    size = spec["resources"]["requests"]["storage"]
    storage_class = spec.get("storageClassName", "the default class") or "no class"
    return f"{size} of {storage_class}, {modes}"


def resource_of(document: Object) -> Resource:
    """Return the resource of an object of deploy/."""
    namespaced = "namespace" in document["metadata"]
    name = document["kind"].lower()
    plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
    return Resource(document["apiVersion"], plural, namespaced, role="")


def lacks_limits(api: Api) -> bool:
    """Return whether a quota of CPU or memory refuses containers without limits."""
    quotas = items(api, QUOTAS) or []
    limited = {name for quota in quotas for name in quota["spec"].get("hard", {})}
    if limited.isdisjoint(QUOTA_RESOURCES):
        return False
    return not items(api, Resource("v1", "limitranges"))


def replace(api: Api, job: Object, seconds: float = 60) -> list[Done]:
    """Create a job in place of an existing one; JobError if that is not deleted in time."""
    name = job["metadata"]["name"]
    late = poll(seconds, 1)
    try:
        api.delete(resource_of(job), name)
    except Refused as error:
        return [Done(job["kind"], name, "refused", one_line(error.message))]
    while api.get(resource_of(job), name) is not None:
        if next(late):
            raise JobError(f"{name} of an earlier install is not deleted after {seconds:g} s")
    return apply(api, [job])


def wait(api: Api, job: Object, seconds: float = 300) -> Iterator[str]:
    """Wait for a job; yield why it waits whenever that changes. JobError if it fails or is late."""
    name = job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]
    end = time.monotonic() + seconds
    last = ""
    failed_pulls = 0
    describe = f"kubectl describe -n {namespace} job/{name} shows why"
    while time.monotonic() < end:
        now = api.get(resource_of(job), name, retry=True)
        if now is None:
            raise JobError(f"{name} does not exist, so volumes may not be writable; install again")
        if condition(now, "Complete"):
            return
        if condition(now, "Failed"):
            raise JobError(f"{name} failed, so volumes may not be writable; {describe}")
        waiting = _waiting(api, name)
        if waiting and waiting != last:
            last = waiting
            yield waiting
            if "ImagePullBackOff" in waiting:
                failed_pulls += 1
            if failed_pulls == 2:
                raise JobError(f"{name} cannot start; give --image, one that nodes can pull")
        time.sleep(1)
    reason = f" ({last})" if last else ""
    raise JobError(f"{name} is not finished after {seconds:g} s{reason}; {describe}")


def _waiting(api: Api, job: str) -> str:
    """Return why the pods of a job wait; '' if none does."""
    pods = api.list_objects(PODS, {"labelSelector": f"job-name={job}"})
    reasons = [waiting_reason(pod) for pod in pods]
    return "; ".join(reason.text for reason in reasons if reason)


def remove(api: Api, target: Installation, *, dry_run: bool = False) -> list[Done]:
    """Delete what installations of any version made in a namespace.

    Of PVCs only those that `target` names are deleted.
    """
    return [_delete(api, one, dry_run=dry_run) for one in _existing(api, target)]


def _existing(api: Api, target: Installation) -> Iterator[Object]:
    for one in every_object(target):
        if existing := api.get(resource_of(one), one["metadata"]["name"]):
            yield {**one, **existing}
    for found in api.list_objects(CONFIG_MAPS, {"labelSelector": OURS}):
        if found["metadata"]["name"].startswith(MAPS):
            yield {"apiVersion": "v1", "kind": "ConfigMap", **found}


def _delete(api: Api, existing: Object, *, dry_run: bool) -> Done:
    kind = existing["kind"]
    name = existing["metadata"]["name"]
    if not PART_OF.items() <= existing["metadata"].get("labels", {}).items():
        return Done(kind, name, "left", "it is not labelled as a part of kfp-ddp")
    try:
        if kind == "ClusterRole" and (others := _others(api, name)):
            return Done(kind, name, "left", f"{others[0]} needs it")
        api.delete(resource_of(existing), name, dry_run=dry_run)
    except ApiError as error:
        return Done(kind, name, "refused", one_line(error.message))
    return Done(kind, name, "deleted")


def _others(api: Api, role: str) -> list[str]:
    """Return the bindings of a role for other namespaces."""
    names = {item["metadata"]["name"] for item in api.list_objects(BINDINGS)}
    others = names - {f"{role}.{api.namespace}"}
    return sorted(name for name in others if name.startswith(f"{role}."))
