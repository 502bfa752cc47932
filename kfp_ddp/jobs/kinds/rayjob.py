"""RayJob of KubeRay: a Ray cluster of its own, and a pod that submits the command to it."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import ClassVar

from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.fields import JobFields
from kfp_ddp.jobs.kinds import base, pod
from kfp_ddp.jobs.kinds.base import Kind, PodRole, Runtime, State, Unsupported
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import part

JOB = "kfp-ddp/job"
"""The label of each pod with the name of its job; KubeRay names only the cluster."""
DASHBOARD_PORT = 8265
# KubeRay then leaves our command, which may prepare code and packages on every node of Ray.
OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
START = ["bash", "-c", 'ulimit -n 65536 2> /dev/null; eval "exec $KUBERAY_GEN_RAY_START_CMD"']
# Workers get ephemeral ports, as ranks of other kinds do, instead of 10002 to 19999. The agents get
# fixed ones beside KubeRay's 52365: for others Ray waits 30 s, too few on a busy node, and fails.
PORTS = {
    **dict.fromkeys(("min-worker-port", "max-worker-port"), "0"),
    "dashboard-agent-grpc-port": "52366",
    "runtime-env-agent-port": "52367",
}
# KubeRay's own program ends with 0 in any case. The pause lets the operator read the status before
# this pod fails, which is else a failed submission. `lost_peer` knows the words for a lost cluster.
SUBMIT = """import asyncio, logging, os, shlex, sys, time
from ray.job_submission import JobSubmissionClient
async def follow(client, job):
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
logging.disable(logging.INFO)
job, entrypoint = os.environ["RAY_JOB_SUBMISSION_ID"], "exec " + shlex.join(sys.argv[1:])
try:
    client = JobSubmissionClient("http://" + os.environ["RAY_DASHBOARD_ADDRESS"])
    client.submit_job(entrypoint=entrypoint, submission_id=job)
    asyncio.run(follow(client, job))
    info = client.get_job_info(job)
except Exception as error:
    sys.exit(f"connection closed by the cluster of Ray: {error}")
if info.status != "SUCCEEDED":
    time.sleep(8)
    code = info.driver_exit_code or sys.exit(info.message or "it failed")
    sys.exit(code if code > 0 else 128 - code)
"""
OF_KUBERAY = ("restart_policy", "backoff_limit", "clean_pod_policy", "ttl_seconds")
BY_KUBERAY = "{setting}={value}: KubeRay has its own way with pods of a rayjob; leave it unset"


class RayJob(Kind):
    """A RayJob: a head and workers with the resources of a node, and a pod that submits to them.

    The command runs on the head, as the driver. The submitting pod prints its output, ends with its
    exit code and remains when KubeRay removes the cluster.
    """

    group_version = "ray.io/v1"
    operator = "KubeRay 1.4"
    operator_selector = "app.kubernetes.io/component=kuberay-operator"
    job_label = JOB
    containers = ("submitter", "ray")
    script_starter = ""
    unsupported = (
        *(base.NO_RUNTIME, base.ONE_PROCESS),
        Unsupported("scheduler", BY_KUBERAY, allowed=("kueue", "runai", "kai")),
        *(Unsupported(setting, BY_KUBERAY) for setting in OF_KUBERAY),
    )
    environment: ClassVar = {**base.UNBUFFERED, "RAY_USAGE_STATS_ENABLED": "0"}
    extra_pods = 1
    replaces_pods = True
    rendezvous_port = 6379

    def manifest(
        self, spec: JobFields, metadata: Object, script_map: str, runtime: Runtime | None = None
    ) -> Object:
        """Return the RayJob."""
        labels = {**metadata["labels"], JOB: metadata["name"]}
        template = pod.template(spec, labels, "ray", script_map)
        submitter = copy.deepcopy(template)
        node = template["spec"]["containers"][0]
        prepared = pod.preparation(spec, script_map, self.script_starter)
        driver = pod.command(spec, script_map, self.script_starter)[len(prepared) :]
        node.pop("args", None)
        node["command"] = [*prepared, *START]
        (container,) = submitter["spec"]["containers"]
        for name in ("volumes", "initContainers"):
            submitter["spec"].pop(name, None)
        container.pop("volumeMounts", None)
        command = ["python3", "-c", SUBMIT, *driver]
        container |= {"name": "submitter", "resources": pod.INIT_CONTAINER, "command": command}
        params = dict(PORTS)
        if spec.gpus():
            params["num-gpus"] = str(spec.gpus())
        cluster: Object = {"headGroupSpec": {"rayStartParams": params, "template": template}}
        if spec.nodes > 1:
            sizes = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), spec.nodes - 1)
            group = {"groupName": "workers", **cluster["headGroupSpec"], **sizes}
            cluster["workerGroupSpecs"] = [group]
        body: Object = {
            "rayClusterSpec": cluster,
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": submitter,
            "submitterConfig": {"backoffLimit": 0},
            "shutdownAfterJobFinishes": True,
        }
        if spec.deadline_minutes:
            body["activeDeadlineSeconds"] = spec.operator_deadline()
        meta = {**metadata, "annotations": {**metadata.get("annotations", {}), **OWN_COMMAND}}
        kind = {"apiVersion": self.group_version, "kind": self.title}
        return {**kind, "metadata": meta, "spec": body}

    def pod_role(self, pod: Object) -> PodRole | None:
        """Return the role of a pod by its labels; None for a pod of another kind of job."""
        labels = pod["metadata"].get("labels") or {}
        if JOB not in labels:
            return None
        role = labels.get("ray.io/node-type", "submitter")
        if role == "worker":  # it has no number
            return PodRole(f"worker-{pod['metadata']['name'].rpartition('-')[2]}")
        return PodRole(f"{role}-0", 0, leads=role == "submitter")

    def state(self, job: Object) -> State:
        """Return the state of a job: KubeRay gives it no conditions."""
        status = part(job, "status")
        deployment = status.get("jobDeploymentStatus")
        if deployment in ("Complete", "Failed"):
            succeeded = deployment == "Complete" and status.get("jobStatus") == "SUCCEEDED"
            message = one_line(status.get("message") or "")
            reason = str(status.get("reason") or "")
            return State("succeeded" if succeeded else "failed", message, reason)
        if self.suspended(job) or deployment in ("Suspending", "Suspended"):
            return State("queued")
        return State("running" if deployment == "Running" else "created")

    def started(self, job: Object) -> float:
        """Return when KubeRay began with the job, or began again after a queue."""
        started = part(job, "status").get("startTime") or job["metadata"]["creationTimestamp"]
        return datetime.fromisoformat(started).timestamp()

    def creators(self, job: Object) -> tuple[str, ...]:
        """Return the names of the objects whose events show why a pod is not created."""
        return job["metadata"]["name"], part(job, "status").get("rayClusterName", "")

    def check(self, spec: JobFields) -> None:
        """Raise ValueError for the first setting that this kind does not support."""
        super().check(spec)
        if not any((spec.command, spec.script, spec.entry)):
            raise ValueError("a rayjob needs a command, a script or an entry: Ray has no default")
