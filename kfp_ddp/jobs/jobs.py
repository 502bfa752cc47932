"""Create a job exactly once, or adopt the job of an earlier launcher."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.log import log
from kfp_ddp.jobs.identity import ATTEMPT, RUN, SPEC, TASK, Identity, Owner, metadata
from kfp_ddp.jobs.kinds import Kind
from kfp_ddp.jobs.kinds.base import Runtime
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import payload
from kfp_ddp.k8s.api import TRANSIENT, Api, ApiError, Object, serves
from kfp_ddp.k8s.objects import annotation, label, part
from kfp_ddp.k8s.resource import CONFIG_MAPS

REPORTED = "kfp-ddp/reported"
"""Marks a failed job whose failure ended a step: a retry of the step needs a new job."""
PREEMPTED = "kfp-ddp/preempted"
"""Marks a job that failed only because of a preemption, which is not counted as an attempt."""
AVOIDS = "kfp-ddp/avoids"
"""The nodes that a job avoids, for the attempts after it."""
DELETION_SECONDS = 300
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass
class Jobs:
    """The jobs of one launch, one for each attempt."""

    api: Api
    spec: LaunchSpec
    identity: Identity
    owner: Owner | None
    avoided: frozenset[str] = frozenset()
    """Hostnames of nodes on which an attempt stalled."""

    @property
    def kind(self) -> Kind:
        """The kind of the jobs."""
        return self.spec.job_kind

    @cached_property
    def runtime(self) -> Runtime | None:
        """The runtime of the jobs; None for a kind without runtimes."""
        return self.kind.find_runtime(self.api, self.spec)

    def attempts(self) -> dict[int, Object]:
        """Return the existing jobs by attempt."""
        query = {"labelSelector": self.identity.selector()}
        try:
            items = self.api.list_objects(self.kind.resource, query, retry=True)
        except ApiError as error:
            raise self._refused(error) from error
        jobs = {int(label(item, ATTEMPT) or 0): item for item in items}
        named = self.identity.job_name
        return {i: job for i, job in jobs.items() if job["metadata"]["name"] == named(i)}

    def ensure(self, attempt: int) -> Object:
        """Create the attempt's job, or adopt an existing one of this run.

        InputError if a job of this name is of another run or has other settings, or cannot be
        created; JobError if a deleted one does not disappear.
        """
        name = self.identity.job_name(attempt)
        wait_until = time.monotonic() + DELETION_SECONDS
        while True:
            try:
                job = self.api.retry(lambda: self._create(attempt))
                log.info(f"created {self.kind.title} {name}")
                return job
            except ApiError as error:
                if error.status != 409:
                    raise self._refused(error) from error
                conflict = error.message
            try:
                existing = self.api.get(self.kind.resource, name, retry=True)
            except ApiError as error:
                raise self._refused(error) from error
            if existing is not None:  # else the conflict is one of a quota, for example
                self._check_owner(existing)
                if "deletionTimestamp" not in existing["metadata"]:
                    log.info(f"adopting {self.kind.title} {name}")
                    return existing
                conflict = "it is being deleted; check its finalizers"
            if time.monotonic() > wait_until:
                raise JobError(
                    f"{self.kind.title} {name} could not be created for "
                    f"{DELETION_SECONDS / 60:g} minutes: {conflict}"
                )
            time.sleep(0.5)

    def check_queued(self, attempt: int) -> None:
        """Raise InputError unless Kueue would suspend the job; one that it does not manage runs."""
        resource = self.kind.resource
        manifest = self.manifest(attempt)
        try:
            job = self.api.create(resource, manifest, query={"dryRun": "All"}, retry=True)
        except ApiError:
            return  # creating the job reports what is wrong
        if not self.kind.suspended(job):
            raise InputError(
                f"queue={self.spec.queue!r}: Kueue here does not manage {resource.plural}."
                f"{resource.group_version}; enable that integration, or leave queue empty"
            )

    def manifest(self, attempt: int, script_map: str = "") -> Object:
        """Return the manifest of an attempt's job."""
        meta = metadata(self.spec, self.identity, self.api.namespace, attempt, self.owner)
        spec = self.spec
        if self.avoided:
            meta["annotations"] = {AVOIDS: ",".join(sorted(self.avoided))}
            spec = spec.model_copy(update={"affinity": away_from(self.avoided, spec.affinity)})
        return self.kind.manifest(spec, meta, script_map, self.runtime)

    def _create(self, attempt: int) -> Object:
        body = self.manifest(attempt, self._script_map())
        return self.api.create(self.kind.resource, body, query={"fieldValidation": "Strict"})

    def _script_map(self) -> str:
        """Create the ConfigMap of the files; return its name, '' for no files or no right."""
        if not payload.files(self.spec):
            return ""
        body = script_map(self.spec, self.identity, self.owner)
        name = str(body["metadata"]["name"])
        try:
            self.api.create(CONFIG_MAPS, body)
        except ApiError as error:
            if error.status == 409:
                if (existing := self.api.get(CONFIG_MAPS, name)) is None:
                    raise  # it was deleted since: the next try creates it
                _check_script(existing, body)
                return name
            if error.status in TRANSIENT:
                raise
            if not payload.fits_variables(self.spec):
                raise InputError(
                    "the script, the code or the packages do not fit into a variable of 128 KiB, "
                    f"and there is no right to create a ConfigMap ({error.message}); apply "
                    "deploy/rbac, or put them into the image"
                ) from error
            return ""
        return name

    def _check_owner(self, job: Object) -> None:
        name = job["metadata"]["name"]
        run_id = label(job, RUN)
        if run_id != self.identity.run_id or label(job, TASK) != self.identity.task:
            raise InputError(
                f"{self.kind.title} {name} exists and is not of this run "
                f"(run {run_id or 'unknown'}); it was not changed: rename the task"
            )
        if label(job, SPEC) != self.identity.spec_digest:
            raise InputError(
                f"{self.kind.title} {name} of this run was created with other settings; "
                "delete it to start again"
            )

    def _refused(self, error: ApiError) -> InputError:
        install = ""
        if error.status == 404 and not serves(self.api, self.kind.resource):
            install = f"; install {self.kind.operator}, or use another kind of job"
        return InputError(f"{error}{install}")

    def mark(self, attempt: int, mark: str) -> None:
        """Mark a failed job for later launchers as REPORTED or PREEMPTED."""
        body = {"metadata": {"annotations": {mark: "true"}}}
        try:
            name = self.identity.job_name(attempt)
            self.api.patch(self.kind.resource, name, body, retry=True)
        except ApiError as error:
            if error.status != 404:
                log.warning(f"cannot mark the failed job ({error.message})")


def script_map(spec: LaunchSpec, identity: Identity, owner: Owner | None) -> Object:
    """Return the ConfigMap with script, code and packages for the pods of every attempt.

    It is immutable, and its name has a digest, since one of an earlier script may exist.
    """
    name = f"{identity.name}-{identity.spec_digest[:8]}"
    meta: Object = {"name": name, "labels": identity.labels(0)}
    if owner is not None:
        meta["ownerReferences"] = [owner.reference()]
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    return {**kind, "metadata": meta, **payload.map_data(spec), "immutable": True}


def _check_script(existing: Object, body: Object) -> None:
    """Check that an existing ConfigMap has the labels and data of this run."""
    meta = body["metadata"]
    labels = part(existing, "metadata", "labels")
    has_labels = labels.items() >= meta["labels"].items()
    has_data = all(part(existing, name) == part(body, name) for name in ("data", "binaryData"))
    if not has_labels or not has_data:
        raise InputError(
            f"ConfigMap {meta['name']} exists and is not of this run; "
            "it was not changed: delete it, or rename the task"
        )


def away_from(nodes: Iterable[str], affinity: Object) -> Object:
    """Return an affinity that also avoids nodes, if there are others."""
    hosts = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(nodes)}
    term = {"weight": 100, "preference": {"matchExpressions": [hosts]}}
    of_nodes = dict(affinity.get("nodeAffinity") or {})
    preferred = [*(of_nodes.get(PREFERRED) or []), term]
    return {**affinity, "nodeAffinity": {**of_nodes, PREFERRED: preferred}}


def avoided(jobs: dict[int, Object]) -> frozenset[str]:
    """Return the nodes that the newest of these jobs avoids."""
    if not jobs:
        return frozenset()
    return frozenset(filter(None, annotation(jobs[max(jobs)], AVOIDS).split(",")))
