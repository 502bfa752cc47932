import copy
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.follow import narrator
from kfp_ddp.jobs.kinds import KINDS, pod_title
from kfp_ddp.jobs.kinds.base import State, started
from kfp_ddp.jobs.kueue import check_queue
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.resource import CLAIMS, EVENTS
from tests import cluster
from tests.cluster import FakeApi
from tests.launch_specs import made, templates

JOB: dict[str, Any] = {"metadata": {"uid": "u", "name": "job", "labels": {}}}


def explain(*fields: Any) -> str:
    return narrator.summary(narrator.explain(*fields))


def unscheduled(message: str, **spec: Any) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return pending(cluster.waiting(), conditions=[condition], spec=spec, containerStatuses=[])


def pending(state: Object, **more: Any) -> Object:
    return cluster.pod("job-master-0", state, **more)


def waiting(reason: str, message: str) -> Object:
    return pending(cluster.waiting(reason, message))


IMAGES = {"persistentVolumeClaim": {"claimName": "images"}}
ROOT = "container has runAsNonRoot and image will run as root"


@pytest.mark.parametrize(
    ("pod", "text"),
    [
        (unscheduled("0/3: 3 Insufficient nvidia.com/gpu."), "no node has enough nvidia.com/gpu"),
        (unscheduled("0/1: resource gap: map[cpu:{{4 -3} {<nil>}]."), "not enough cpu"),
        (unscheduled("0/3 ...: 3 node(s) had untolerated taint {gpu: }"), "nodes are tainted"),
        (unscheduled("3 node(s) didn't match Pod's node affinity/selector"), "no node fits its"),
        (waiting("ImagePullBackOff", "not found"), "cannot pull a:1 (ImagePullBackOff: not found)"),
        (waiting("CreateContainerConfigError", 'secret "s" not found'), "cannot start"),
        (waiting("CreateContainerConfigError", ROOT), "or non_root=false"),
        (unscheduled("x", volumes=[IMAGES]), "claim images does not exist"),
    ],
)
def test_a_pending_pod_is_explained(pod: dict[str, Any], text: str) -> None:
    assert text in explain(JOB, State("created"), [pod], [], FakeApi())


GPUS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
CLASSES = "/apis/storage.k8s.io/v1/storageclasses/fast"
IMMEDIATE = {"volumeBindingMode": "Immediate"}
AT_FIRST_USE = {"volumeBindingMode": "WaitForFirstConsumer"}


@pytest.mark.parametrize(
    ("storage", "message", "blamed"),
    [
        (IMMEDIATE, GPUS, True),
        (AT_FIRST_USE, GPUS, False),
        (403, GPUS, False),
        (404, GPUS, True),
        (AT_FIRST_USE, "3 node(s) had volume node affinity conflict", True),
        (403, "pod has unbound immediate PersistentVolumeClaims", True),
        (AT_FIRST_USE, "0/3 nodes: 3 Insufficient ephemeral-storage", False),
        (AT_FIRST_USE, f"{GPUS} {'x' * 300} did not find available persistent volumes", True),
    ],
)
def test_an_unbound_claim_is_blamed_with_cause(storage: Any, message: str, blamed: bool) -> None:
    claim = {"spec": {"storageClassName": "fast"}, "status": {"phase": "Pending"}}
    api = FakeApi({f"{CLAIMS.path('space')}/images": claim, CLASSES: storage})
    line = explain(JOB, State("created"), [unscheduled(message, volumes=[IMAGES])], [], api)
    assert ("claim images is not bound" in line) == blamed
    assert one_line(message) in line


@pytest.mark.parametrize(
    ("reason", "remedy"), [("FailedAttachVolume", "publish=clone"), ("FailedMount", "secrets")]
)
def test_an_unmounted_volume_is_explained_by_events(reason: str, remedy: str) -> None:
    pod = waiting("ContainerCreating", "")
    event = {
        "reason": reason,
        "message": "Multi-Attach error\nfor volume",
        "involvedObject": {"name": "job-master-0"},
    }
    events = {"items": [event, {**event, "reason": "Pulled", "message": "no"}]}
    api = FakeApi({EVENTS.path("space"): events})
    line = explain(JOB, State("created"), [pod], [], api)
    assert "Multi-Attach error for volume" in line
    assert remedy in line
    events["items"].clear()
    assert explain(JOB, State("created"), [pod], [], api) == "job-master-0: starting"
    assert explain(JOB, State("created"), [pod], [], FakeApi()) == "job-master-0: starting"


def kueue(**objects: Any) -> FakeApi:
    """Return an API server with Kueue."""
    group = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    base = "/apis/kueue.x-k8s.io/v1beta2/namespaces/space"
    named = {f"{base}/{name}": item for name, item in objects.items()}
    return FakeApi({"/apis/kueue.x-k8s.io": group, **named})


def workload(
    uid: str, at: int, *conditions: dict[str, Any], queue: str = "team", priority: int = 0
) -> dict[str, Any]:
    owner = {"uid": uid, "kind": "PyTorchJob", "name": f"job-{uid}"}
    stamp = f"2026-11-21T10:00:0{at}Z"
    return {
        "metadata": {"uid": f"w-{uid}", "ownerReferences": [owner], "creationTimestamp": stamp},
        "spec": {"queueName": queue, "priority": priority},
        "status": {"conditions": list(conditions)},
    }


PENDING = {"type": "QuotaReserved", "status": "False", "message": "no quota for 8 GPUs"}
HOLDING = {"type": "QuotaReserved", "status": "True"}
QUEUED = {"metadata": {**JOB["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "team"}}}


def queued(*workloads: dict[str, Any]) -> str:
    api = kueue(workloads={"items": list(workloads)})
    return explain(QUEUED, State("queued"), [], [], api)


def test_a_queued_job_knows_its_place() -> None:
    line = queued(
        workload("first", 1, PENDING),
        workload("u", 2, PENDING),
        workload("late", 3, PENDING),
        workload("urgent", 4, PENDING, priority=9),
        workload("elsewhere", 1, PENDING, queue="other"),
        workload("running", 1, HOLDING),
        workload("done", 1, HOLDING, {"type": "Finished", "status": "True"}),
    )
    assert line == (
        "waiting in queue team, behind PyTorchJob job-urgent, PyTorchJob job-first, "
        "while PyTorchJob job-running has the quota (no quota for 8 GPUs)"
    )


def test_of_many_jobs_ahead_a_few_are_named() -> None:
    ahead = [workload(str(number), number, PENDING) for number in range(5)]
    line = queued(workload("u", 9, PENDING), *ahead)
    assert "behind PyTorchJob job-0, PyTorchJob job-1, PyTorchJob job-2 and 2 more (" in line


def test_a_preempted_job_names_the_preempting_one() -> None:
    message = "Preempted to accommodate a workload (UID: w-urgent, JobUID: urgent) due to priority"
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": message}
    same = {**PENDING, "message": message}
    line = queued(workload("u", 1, evicted, same), workload("urgent", 2, HOLDING, priority=9))
    assert line == (
        "preempted (Preempted to accommodate PyTorchJob job-urgent due to priority); waiting in "
        "queue team, first in line, while PyTorchJob job-urgent has the quota"
    )


def test_a_job_that_kueue_has_not_handled_yet() -> None:
    assert queued() == "waiting for Kueue to add it to queue team"
    assert queued(workload("u", 1)) == "waiting for Kueue to add it to queue team"
    assert explain(JOB, State("queued"), [], [], kueue()).startswith("suspended; ")


def test_a_queue_is_looked_up_in_the_version_that_is_served() -> None:
    stopped = {"type": "Active", "status": "False", "message": "LocalQueue is stopped"}
    api = kueue(
        **{
            "localqueues/team": {"status": {"conditions": []}},
            "localqueues/held": {"status": {"conditions": [stopped]}},
        }
    )
    assert check_queue(api, "team") == []
    assert check_queue(api, "held") == ["queue held admits no jobs now: LocalQueue is stopped"]
    with pytest.raises(InputError, match="'nowhere' is not a LocalQueue of namespace space"):
        check_queue(api, "nowhere")
    with pytest.raises(InputError, match="this cluster has no Kueue"):
        check_queue(FakeApi(), "team")


def test_a_deadline_counts_from_when_the_queue_let_the_job_go() -> None:
    def job(*conditions: dict[str, Any]) -> dict[str, Any]:
        meta = {"creationTimestamp": "2026-11-21T10:00:00Z"}
        return {"metadata": meta, "status": {"conditions": list(conditions)}}

    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-21T10:05:00Z"}
    assert started(job(resumed)) - started(job()) == 300
    assert started(job({**resumed, "status": "True"})) == started(job())


SCHEDULED: dict[str, Any] = {
    "volumes": [{"name": "key", "secret": {"secretName": "a", "optional": True}}],
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": ""}],
}


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ((), ""),
        (("spec", "tolerations", 0, "effect"), ""),  # empty as it was sent
        (("spec", "terminationGracePeriodSeconds"), ".spec.terminationGracePeriodSeconds"),
        (("spec", "volumes", 0, "secret", "optional"), ".secret.optional"),
        (("spec", "containers", 0, "volumeMounts", 0, "mountPath"), ".volumeMounts.0.mountPath"),
    ],
)
def test_the_field_that_a_trainjob_has_lost_is_named(path: tuple[Any, ...], named: str) -> None:
    """A queue removed it as it admitted the job, and added its own patch."""
    sent = {"spec": made("trainjob", **SCHEDULED)}
    job = copy.deepcopy(sent)
    place = templates(job["spec"])["Node"]
    for name in path[:-1]:
        place = place[name]
    if path:
        place.pop(path[-1], None)
    job["spec"]["runtimePatches"].append({"manager": "kueue.x-k8s.io/manager"})
    lost = KINDS["trainjob"].lost(job, sent)
    assert bool(lost) == bool(named)
    assert f"{named} and was deleted" in lost or not named


def test_a_trainjob_without_our_patches_is_recognized() -> None:
    sent = {"spec": made("trainjob")}
    for patches in ({}, {"runtimePatches": [{"manager": "kueue.x-k8s.io/manager"}]}):
        lost = KINDS["trainjob"].lost({"spec": patches}, sent)
        assert lost.startswith("has lost runtimePatches and was deleted")


def test_states_of_both_kinds_of_jobs() -> None:
    def job(*kinds: str, **more: Any) -> dict[str, Any]:
        conditions = [{"type": kind, "status": "True"} for kind in kinds]
        return {"status": {"conditions": conditions, **more.get("status", {})}, "spec": more}

    def phase(kind: str, item: dict[str, Any]) -> str:
        return KINDS[kind].state(item).phase

    assert phase("pytorchjob", {}) == "created"
    assert phase("pytorchjob", job("Created", "Running")) == "running"
    assert phase("pytorchjob", job("Created", "Running", "Succeeded")) == "succeeded"
    assert phase("trainjob", job("Complete")) == "succeeded"
    assert phase("pytorchjob", job("Failed")) == "failed"
    assert phase("trainjob", job("Created", suspend=True)) == "queued"
    assert phase("pytorchjob", job("Created", runPolicy={"suspend": True})) == "queued"
    assert phase("trainjob", trainjob(active=2)) == "created"  # its pods may wait for a node
    assert phase("trainjob", trainjob(active=2, ready=1)) == "running"
    assert phase("trainjob", trainjob(succeeded=1)) == "running"


def test_state_and_start_of_a_rayjob() -> None:
    def phase(at: str, result: str = "") -> str:
        return kind.state({"status": {"jobDeploymentStatus": at, "jobStatus": result}}).phase

    kind, meta = KINDS["rayjob"], {"creationTimestamp": "2026-11-21T10:00:00Z"}
    phases = [phase(at) for at in ("", "Initializing", "Running", "Suspending")]
    assert phases == ["created", "created", "running", "queued"]
    assert phase("Complete", "SUCCEEDED") == "succeeded"
    assert phase("Complete", "STOPPED") == phase("Failed", "FAILED") == "failed"
    later = {"metadata": meta, "status": {"startTime": "2026-11-21T10:05:00Z"}}
    assert kind.started(later) - kind.started({"metadata": meta}) == 300


def test_pods_of_a_rayjob_by_role() -> None:
    def title(**labels: str) -> str:
        return pod_title({"metadata": {"name": "job-workers-x2", "labels": labels}})

    types = [{"ray.io/node-type": kind} for kind in ("head", "worker")]
    assert [title(**{"kfp-ddp/job": "job"}, **labels) for labels in ({}, *types)] == [
        *("submitter-0", "head-0", "worker-x2")
    ]
    assert title(**types[0]) == "job-workers-x2"


def trainjob(**counts: int) -> dict[str, Any]:
    return {"status": {"jobsStatus": [{"name": "node", "ready": 0, **counts}]}}


def test_a_deadline_that_an_operator_enforced_is_known_in_both_kinds() -> None:
    def past(kind: str, reason: str, message: str) -> bool:
        condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
        return KINDS[kind].state({"status": {"conditions": [condition]}}).past_deadline

    v1 = "Job x has failed because it was active longer than specified deadline"
    assert past("pytorchjob", "PyTorchJobFailed", v1)
    assert past("trainjob", "DeadlineExceeded", "TrainJob exceeded its active deadline")
    assert not past("pytorchjob", "PyTorchJobFailed", "1 Worker replica(s) failed.")
    assert not KINDS["pytorchjob"].state({}).past_deadline
