"""Making a job exactly once, and finding the one that an earlier launcher made."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.jobs import payload
from kfp_ddp.jobs.identity import ATTEMPT, RUN, SPEC, TASK, Identity, Owner, metadata
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import TRANSIENT, Api, ApiError, Object, core
from kfp_ddp.k8s.objects import annotation, label

REPORTED = "kfp-ddp/reported"
"""The mark of a failed job whose failure ended a step: whoever comes later wants a new one."""
PREEMPTED = "kfp-ddp/preempted"
"""The mark of a failed job that failed of its preemption alone, which counts as no attempt."""
AVOIDS = "kfp-ddp/avoids"
"""The nodes that a job avoids, for those that are made after it."""
DELETION_SECONDS = 300
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass
class Jobs:
    """The jobs of one launch: one for each attempt, named after it."""

    api: Api
    spec: LaunchSpec
    identity: Identity
    owner: Owner | None
    avoided: frozenset[str] = frozenset()
    """Nodes on which an attempt stood still, by their hostname."""

    @property
    def kind(self) -> Kind:
        """The kind of the jobs."""
        return self.spec.job_kind

    @cached_property
    def runtime(self) -> Runtime | None:
        """What the jobs are made from; None for a kind without runtimes."""
        return self.kind.find_runtime(self.api, self.spec)

    def path(self, attempt: int) -> str:
        """Path of an attempt's job."""
        return self.kind.path(self.api.namespace, self.identity.job_name(attempt))

    def attempts(self) -> dict[int, Object]:
        """The jobs that exist, by attempt."""
        path = self.kind.path(self.api.namespace)
        query = {"labelSelector": self.identity.selector()}
        try:
            found = self.api.call("GET", path, query=query, retry=True)
        except ApiError as error:
            raise InputError(self._no_access("list", error)) from error
        jobs = {int(item["metadata"]["labels"].get(ATTEMPT, "0")): item for item in found["items"]}
        named = self.identity.job_name
        return {i: job for i, job in jobs.items() if job["metadata"]["name"] == named(i)}

    def ensure(self, attempt: int) -> Object:
        """Create the attempt's job, or adopt it when it is there and ours.

        Raises:
            InputError: when a job of this name is not ours, was made from another
                specification, or cannot be created.
            JobError: when one of this name does not go away.
        """
        wait_until = time.monotonic() + DELETION_SECONDS
        while True:
            try:
                found = self.api.retry(lambda: self._create(attempt))
                print(f"created {self.kind.title} {found['metadata']['name']}", flush=True)
                return found
            except ApiError as error:
                if error.status != 409:
                    raise InputError(self._refused(error)) from error
            try:
                found = self.api.call("GET", self.path(attempt), retry=True)
            except ApiError as error:
                if error.status == 404:
                    continue
                raise InputError(self._refused(error)) from error
            self._check_ours(found)
            if "deletionTimestamp" not in found["metadata"]:
                print(f"adopting {self.kind.title} {found['metadata']['name']}", flush=True)
                return found
            if time.monotonic() > wait_until:
                raise JobError(
                    f"{self.kind.title} {found['metadata']['name']} has been terminating for "
                    f"{DELETION_SECONDS / 60:g} minutes; check its finalizers"
                )
            time.sleep(0.5)

    def check_queued(self, attempt: int) -> None:
        """Make sure that Kueue would hold the job: one that it does not manage runs at once.

        Raises:
            InputError: when it would not, which no object of Kueue tells but a dry run.
        """
        path, body = self.kind.path(self.api.namespace), self.manifest(attempt)
        try:
            dry = {"dryRun": "All"}
            found = self.api.call("POST", path, body, dry, retry=True)
        except ApiError:
            return  # what is wrong is told when it is created
        if not self.kind.suspended(found):
            raise InputError(
                f"queue={self.spec.queue!r}: Kueue here does not manage {self.kind.plural}."
                f"{self.kind.group_version}; enable that integration, or leave queue empty"
            )

    def manifest(self, attempt: int, script_map: str = "") -> Object:
        """The job object of an attempt."""
        meta = metadata(self.spec, self.identity, self.api.namespace, attempt, self.owner)
        spec = self.spec
        if self.avoided:
            meta["annotations"] = {AVOIDS: ",".join(sorted(self.avoided))}
            affinity = away_from(self.avoided, spec.affinity)
            spec = spec.model_copy(update={"affinity": affinity})
        return self.kind.manifest(spec, meta, script_map, self.runtime)

    def _create(self, attempt: int) -> Object:
        body = self.manifest(attempt, self._script_map())
        path = self.kind.path(self.api.namespace)
        return self.api.call("POST", path, body, {"fieldValidation": "Strict"})

    def _script_map(self) -> str:
        """The ConfigMap of what travels, made if need be; '' where we have no right to make one."""
        if not payload.files(self.spec):
            return ""
        path = core(self.api.namespace, "configmaps")
        body = script_map(self.spec, self.identity, self.owner)
        name = str(body["metadata"]["name"])
        try:
            self.api.call("POST", path, body)
        except ApiError as error:
            if error.status == 409:
                self._check_script(path, body)
                return name
            if error.status in TRANSIENT:
                raise
            if not payload.fits_variables(self.spec):
                raise InputError(
                    "the script, the code or the packages do not fit into a variable of 128 KiB, "
                    f"and no ConfigMap may be made for them ({error.message}); apply deploy/rbac, "
                    "or put them into the image"
                ) from error
            return ""
        return name

    def _check_script(self, path: str, body: Object) -> None:
        """Refuse a map of this name that does not hold what this run made."""
        meta = body["metadata"]
        found = self.api.call("GET", f"{path}/{meta['name']}")
        labels = found["metadata"].get("labels") or {}
        ours = labels.items() >= meta["labels"].items()
        same = all((found.get(name) or {}) == body.get(name, {}) for name in ("data", "binaryData"))
        if not ours or not same:
            raise InputError(
                f"ConfigMap {meta['name']} exists and does not hold this run's script; it is left "
                "alone: delete it, or rename the task"
            )

    def _check_ours(self, found: Object) -> None:
        name, run_id = found["metadata"]["name"], label(found, RUN)
        if run_id != self.identity.run_id or label(found, TASK) != self.identity.task:
            raise InputError(
                f"{self.kind.title} {name} exists and is not of this run "
                f"(run {run_id or 'unknown'}); it is left alone: rename the task"
            )
        if label(found, SPEC) != self.identity.spec_digest:
            raise InputError(
                f"{self.kind.title} {name} of this run was made from another specification; "
                "delete it to start anew"
            )

    def _refused(self, error: ApiError) -> str:
        if error.status in (403, 404):
            return self._no_access("create", error)
        return f"the cluster refused the {self.kind.title}: {' '.join(error.message.split())}"

    def _no_access(self, verb: str, error: ApiError) -> str:
        where = f"in namespace {self.api.namespace}"
        if error.status == 404:
            return (
                f"this cluster has no {self.kind.plural} ({self.kind.group_version}); "
                f"install {self.kind.operator}, or use another backend"
            )
        if error.status == 403 and "quota" in error.message:
            return f"a quota {where} does not allow the job: {' '.join(error.message.split())}"
        if error.status == 403 and "cannot" in error.message:
            return f"no right to {verb} {self.kind.plural} {where}; apply deploy/rbac there"
        return f"the cluster refused the {self.kind.title}: {' '.join(error.message.split())}"

    def mark(self, attempt: int, mark: str) -> None:
        """Note on a failed job what it is to those who come later: REPORTED or PREEMPTED."""
        body = {"metadata": {"annotations": {mark: "true"}}}
        try:
            self.api.call("PATCH", self.path(attempt), body, retry=True)
        except ApiError as error:
            if error.status != 404:
                print(f"warning: cannot mark the failed job ({error.message})", flush=True)


def script_map(spec: LaunchSpec, identity: Identity, owner: Owner | None) -> Object:
    """The ConfigMap by which a script, code and packages reach the pods of every attempt.

    It is immutable, and one from before a script was edited may be there: names tell them apart.
    """
    name = f"{identity.name}-{identity.spec_digest[:8]}"
    meta: Object = {"name": name, "labels": identity.labels(0)}
    if owner is not None:
        meta["ownerReferences"] = [owner.reference()]
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    return {**kind, "metadata": meta, **payload.map_data(spec), "immutable": True}


def away_from(nodes: Iterable[str], affinity: Object) -> Object:
    """An affinity that avoids nodes, too, where there are others: a job that waits helps nobody."""
    hosts = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(nodes)}
    term = {"weight": 100, "preference": {"matchExpressions": [hosts]}}
    of_nodes = dict(affinity.get("nodeAffinity") or {})
    preferred = [*(of_nodes.get(PREFERRED) or []), term]
    return {**affinity, "nodeAffinity": {**of_nodes, PREFERRED: preferred}}


def avoided(jobs: dict[int, Object]) -> frozenset[str]:
    """The nodes that the newest of these jobs avoids."""
    if not jobs:
        return frozenset()
    return frozenset(filter(None, annotation(jobs[max(jobs)], AVOIDS).split(",")))


def marked(job: Object, mark: str) -> bool:
    """Whether a job bears the mark REPORTED or PREEMPTED."""
    return annotation(job, mark) != ""
