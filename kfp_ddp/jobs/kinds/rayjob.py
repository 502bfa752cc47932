"""RayJob of KubeRay: a Ray cluster of its own, and a pod that submits the command to it."""

from __future__ import annotations

import copy

from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.fields import JobFields
from kfp_ddp.jobs.kinds import pod
from kfp_ddp.jobs.kinds.base import (
    NO_RUNTIME,
    NOT_ELASTIC,
    ONE_PROCESS,
    UNBUFFERED,
    Kind,
    PodRole,
    Runtime,
    State,
    Unsupported,
    at_seconds,
)
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.resource import Resource

GROUP_VERSION = "ray.io/v1"
JOB = "kfp-ddp/job"
"""The label of each pod with the name of its job; KubeRay names only the cluster."""
NODE_TYPE = "ray.io/node-type"
DASHBOARD_PORT = 8265
# KubeRay then leaves our command, which may prepare code and packages on every node of Ray.
OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
START = ["bash", "-c", 'ulimit -n 65536 2> /dev/null; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
# Ephemeral ports instead of 10002 to 19999, as of all other kinds.
PORTS = {"min-worker-port": "0", "max-worker-port": "0"}
# KubeRay's own program ends with 0 whatever the command does. The pause lets the operator read the
# status of the job before this pod fails, which it would take for a failed submission. The words
# for a lost cluster are of those that `lost_peer` knows.
SUBMIT = """import asyncio, logging, os, shlex, sys, time
from ray.job_submission import JobStatus, JobSubmissionClient
logging.disable(logging.INFO)
job = os.environ["RAY_JOB_SUBMISSION_ID"]
async def follow():
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
try:
    client = JobSubmissionClient("http://" + os.environ["RAY_DASHBOARD_ADDRESS"])
    client.submit_job(entrypoint="exec " + shlex.join(sys.argv[1:]), submission_id=job)
    asyncio.run(follow())
    info = client.get_job_info(job)
except Exception as error:
    sys.exit(f"connection closed by the cluster of Ray: {error}")
if info.status != JobStatus.SUCCEEDED:
    if info.driver_exit_code is None:
        print(info.message, flush=True)
    time.sleep(8)
    code = info.driver_exit_code or 1
    sys.exit(code if code > 0 else 128 - code)
"""
SUBMITTER_RESOURCES: Object = {
    "limits": {"cpu": "1", "memory": "1Gi"},
    "requests": {"cpu": "50m", "memory": "256Mi"},
}
ENDED_BY_KUBERAY = "{setting}={value} cannot be set on a rayjob: "


class RayJob(Kind):
    """A RayJob: a head and workers with the resources of a node, and a pod that submits to them.

    The command runs on the head, as the driver. The submitting pod prints its output, ends with its
    exit code and remains when KubeRay removes the cluster.
    """

    name = "rayjob"
    title = "RayJob"
    resource = Resource(GROUP_VERSION, "rayjobs")
    operator = "KubeRay 1.4"
    operator_selector = "app.kubernetes.io/component=kuberay-operator"
    job_label = JOB
    containers = ("submitter", "ray")
    script_starter = ""
    unsupported = (
        NOT_ELASTIC,
        NO_RUNTIME,
        ONE_PROCESS,
        Unsupported(
            "scheduler",
            ENDED_BY_KUBERAY + "its pods are started one by one; use kueue, or a pytorchjob",
            allowed=("kueue", "runai"),
        ),
        Unsupported(
            "restart_policy", ENDED_BY_KUBERAY + "KubeRay replaces failed pods; use retries"
        ),
        Unsupported("backoff_limit", ENDED_BY_KUBERAY + "use retries, which count whole jobs"),
        Unsupported(
            "clean_pod_policy", ENDED_BY_KUBERAY + "KubeRay removes its cluster at its end"
        ),
        Unsupported(
            "ttl_seconds", ENDED_BY_KUBERAY + "a RayJob is deleted with the Workflow of its run"
        ),
    )
    environment = UNBUFFERED
    extra_pods = 1
    replaces_pods = True
    rendezvous_port = 6379

    def manifest(
        self,
        spec: JobFields,
        metadata: Object,
        script_map: str = "",
        runtime: Runtime | None = None,
    ) -> Object:
        """Return the RayJob."""
        labels = {**metadata["labels"], JOB: metadata["name"]}
        template = pod.template(spec, labels, "ray", script_map)
        submitter, node = copy.deepcopy(template), template["spec"]["containers"][0]
        prepared = pod.preparation(spec, script_map)
        driver = pod.command(spec, script_map)[len(prepared) :]
        node.pop("args", None)
        node["command"] = [*prepared, *START]
        for name in ("volumes", "initContainers"):
            submitter["spec"].pop(name, None)
        (container,) = submitter["spec"]["containers"]
        container.pop("volumeMounts", None)
        container |= {"name": "submitter", "resources": SUBMITTER_RESOURCES}
        container["command"] = ["python3", "-c", SUBMIT, *driver]
        params = PORTS | ({"num-gpus": str(spec.gpus())} if spec.gpus() else {})
        cluster: Object = {"headGroupSpec": {"rayStartParams": params, "template": template}}
        if workers := spec.nodes - 1:
            count = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
            group = {"groupName": "workers", "rayStartParams": params, "template": template}
            cluster["workerGroupSpecs"] = [{**group, **count}]
        body: Object = {
            "rayClusterSpec": cluster,
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": submitter,
            "submitterConfig": {"backoffLimit": 0},
            "shutdownAfterJobFinishes": True,
        }
        if spec.deadline_minutes:
            body["activeDeadlineSeconds"] = spec.operator_deadline()
        annotations = {**metadata.get("annotations", {}), **OWN_COMMAND}
        kind = {"apiVersion": GROUP_VERSION, "kind": self.title}
        return {**kind, "metadata": {**metadata, "annotations": annotations}, "spec": body}

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        labels = pod["metadata"].get("labels") or {}
        if JOB not in labels:
            return None
        role = labels.get(NODE_TYPE, "submitter")
        if role == "worker":  # it has no number
            return PodRole(f"worker-{pod['metadata']['name'].rpartition('-')[2]}")
        return PodRole(f"{role}-0", 0, leads=role == "submitter")

    def state(self, job: Object) -> State:
        """Return the state of a job: KubeRay gives it no conditions."""
        status = job.get("status") or {}
        at, message = status.get("jobDeploymentStatus"), one_line(status.get("message") or "")
        if at in ("Complete", "Failed"):
            succeeded = at == "Complete" and status.get("jobStatus") == "SUCCEEDED"
            reason = str(status.get("reason") or "")
            return State("succeeded" if succeeded else "failed", message, reason)
        if self.suspended(job) or at in ("Suspending", "Suspended"):
            return State("queued")
        return State("running" if at == "Running" else "created")

    def suspended(self, job: Object) -> bool:
        """Return whether the job's spec suspends it, as a queue does."""
        return bool((job.get("spec") or {}).get("suspend"))

    def started(self, job: Object) -> float:
        """Return when KubeRay began with the job, or began again after a queue."""
        begun = (job.get("status") or {}).get("startTime")
        return at_seconds(begun) if begun else super().started(job)

    def creators(self, job: Object) -> tuple[str, ...]:
        """Return the names of the objects whose events show why a pod is not created."""
        return job["metadata"]["name"], (job.get("status") or {}).get("rayClusterName", "")

    def check(self, spec: JobFields) -> None:
        """Raise ValueError for the first setting that this kind does not support."""
        super().check(spec)
        if not (spec.command or spec.script or spec.entry):
            raise ValueError("a rayjob needs a command, a script or an entry: Ray has no default")
