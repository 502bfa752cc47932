"""Who a job belongs to: its name, labels and Workflow."""

import os
import re
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.files import sha256_of_json
from kfp_ddp.core.run_folder import LABEL_VALUE, task_title
from kfp_ddp.jobs.kueue import QUEUE_LABEL
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, Object, own_pod
from kfp_ddp.k8s.objects import label
from kfp_ddp.k8s.pods import node_of, task_of
from kfp_ddp.k8s.resource import WORKFLOWS

KFP_RUN = "pipeline/runid"
"""The label that KFP gives a run's Workflow and pods."""
RUN, TASK, SPEC, ATTEMPT = (f"kfp-ddp/{key}" for key in ("run-id", "task", "spec", "attempt"))
STEP = "kfp-ddp/step"
"""The label of a step's pod with the name of its component; deploy/network selects by it."""


class Ids(NamedTuple):
    """What tells the job of a step from all others."""

    run_id: str
    task_name: str
    task_id: str
    """Distinguishes iterations of a loop."""


def ids_of_step(run_id: str, task_name: str, task_id: str) -> Ids:
    """Return the ids of this step: what is empty is read from its own pod.

    Outside of KFP, where no step is retried, the run has a new id. InputError if the pod cannot be
    read.
    """
    given = Ids(run_id, task_name, task_id)
    if run_id and task_name:
        return given
    in_a_pod = os.environ.get("KFP_POD_NAME")
    found = _ids_of_pod() if in_a_pod else Ids(f"local-{uuid.uuid4().hex[:12]}", "job", "")
    return found._replace(**{name: value for name, value in given._asdict().items() if value})


def _ids_of_pod() -> Ids:
    pod = own_pod(Api.connect())
    if pod is None:
        raise InputError(
            "run_id or task_name is empty, and the step's own pod, which has them, cannot be read: "
            "grant its account get of pods, or pass PIPELINE_JOB_ID_PLACEHOLDER as run_id and "
            "PIPELINE_TASK_NAME_PLACEHOLDER as task_name"
        )
    node = node_of(pod)  # of one task, in one iteration, and the same when the step is retried
    return Ids(label(pod, KFP_RUN), task_of(node), node)


@dataclass(frozen=True)
class Identity:
    """The identity of a task's launch, the same when the step is retried."""

    run_id: str
    task: str
    name: str
    spec_digest: str

    def job_name(self, attempt: int) -> str:
        """Return the name of an attempt's job; attempts count from 0."""
        return f"{self.name}-r{attempt}" if attempt else self.name

    def labels(self, attempt: int) -> dict[str, str]:
        """Return the labels of our jobs."""
        return {
            RUN: self.run_id,
            TASK: self.task,
            SPEC: self.spec_digest,
            ATTEMPT: str(attempt),
            "app.kubernetes.io/managed-by": "kfp-ddp",
        }

    def selector(self) -> str:
        """Return the label selector of all attempts."""
        return f"{RUN}={self.run_id},{TASK}={self.task}"


def identify(run_id: str, task_name: str, task_id: str, spec: LaunchSpec) -> Identity:
    """Return the identity of a launch; InputError for an id that cannot be a label.

    Its name is a DNS-1035 name of at most 40 characters, with a hash of run, task and DAG, which
    distinguishes iterations of a loop.
    """
    if not LABEL_VALUE.fullmatch(run_id):
        raise InputError(
            f"run_id={run_id!r} cannot be a label: 1 to 63 letters, digits, '.', '_' or '-', "
            "with a letter or digit at both ends"
        )
    slug = re.sub(r"[^a-z0-9]+", "-", task_name.lower()).strip("-")[:25].strip("-")
    if not slug or not slug[0].isalpha():
        slug = f"t-{slug}".strip("-")
    name = f"{slug}-{sha256_of_json([run_id, task_name, task_id])[:12]}"
    digest = sha256_of_json(spec.model_dump(mode="json"))[:16]
    return Identity(run_id, task_title(task_name, task_id), name, digest)


@dataclass(frozen=True)
class Owner:
    """The step's own pod and the Argo Workflow above it."""

    pod: str
    workflow: str
    workflow_uid: str

    def reference(self) -> Object:
        """Return the ownerReference with which the job is deleted when its run's Workflow is."""
        return {
            "apiVersion": WORKFLOWS.group_version,
            "kind": "Workflow",
            "name": self.workflow,
            "uid": self.workflow_uid,
            "controller": False,
            "blockOwnerDeletion": False,
        }


def find_owner(api: Api) -> Owner | None:
    """Return the Workflow of the step's own pod; None outside of a pipeline on this cluster."""
    pod: Object = (own_pod(api) or {}).get("metadata", {})
    for owner in pod.get("ownerReferences", []):
        if owner["kind"] == "Workflow" and owner["apiVersion"] == WORKFLOWS.group_version:
            return Owner(pod["name"], owner["name"], owner["uid"])
    return None


QUEUE_LABELS = {
    "kueue": QUEUE_LABEL,
    "runai": "runai/queue",
    "kai": "kai.scheduler/queue",  # since KAI 0.6
}
"""Labels that name the queue of a job; the operator names that of the other schedulers."""


def metadata(
    spec: LaunchSpec, identity: Identity, namespace: str, attempt: int, owner: Owner | None
) -> dict[str, Any]:
    """Return the metadata of the job."""
    labels = identity.labels(attempt)
    if spec.queue and spec.scheduler in QUEUE_LABELS:
        labels[QUEUE_LABELS[spec.scheduler]] = spec.queue
    name = identity.job_name(attempt)
    meta: dict[str, Any] = {"name": name, "namespace": namespace, "labels": labels}
    if owner is not None:
        meta["ownerReferences"] = [owner.reference()]
    return meta
