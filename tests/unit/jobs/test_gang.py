"""Gang scheduling by Volcano and coscheduling, and the runtime of a TrainJob."""

import time
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import gangs
from kfp_ddp.jobs.follow.narrator import NO_PODS, explain, summary
from kfp_ddp.jobs.gangs import check_gang, gang_problem
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.pods import Reason
from tests.cluster import FakeApi

GROUPS = {
    "volcano": ("scheduling.volcano.sh", "v1beta1", "annotations", "scheduling.k8s.io/group-name"),
    "coscheduling": ("scheduling.x-k8s.io", "v1alpha1", "labels", "scheduling.x-k8s.io/pod-group"),
}
JOB: Object = {"metadata": {"name": "job"}, "status": {"conditions": []}}
JOB_PATH = "/apis/kubeflow.org/v1/namespaces/space/pytorchjobs/job"
PODS = "/api/v1/namespaces/space/pods"
TAKEN_UP = {**JOB, "status": {"conditions": [{"type": "Created", "status": "True"}]}}
OVER = {**JOB, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}


def spec(scheduler: str) -> LaunchSpec:
    return LaunchSpec.create(image="a:1", command=["true"], scheduler=scheduler)


def group_of(scheduler: str) -> str:
    group, version, _, _ = GROUPS[scheduler]
    return f"/apis/{group}/{version}/namespaces/space/podgroups/job"


@pytest.mark.parametrize("scheduler", list(GROUPS))
def test_a_cluster_without_pod_groups_is_refused(scheduler: str) -> None:
    group, version, _, _ = GROUPS[scheduler]
    assert f"scheduler={scheduler}: " in str(gang_problem(FakeApi({}), spec(scheduler)))
    served = FakeApi({f"/apis/{group}/{version}": {"resources": [{"name": "podgroups"}]}})
    assert gang_problem(served, spec(scheduler)) is None


@pytest.mark.parametrize("scheduler", ["", "kueue", "runai", "kai"])
def test_another_scheduler_needs_no_pod_group(scheduler: str) -> None:
    assert gang_problem(FakeApi({}), spec(scheduler)) is None
    check_gang(FakeApi({}), spec(scheduler), JOB)


@pytest.mark.parametrize("scheduler", list(GROUPS))
@pytest.mark.parametrize("groups", [404, 403])
def test_a_job_whose_pods_are_in_no_group_is_deleted(scheduler: str, groups: int) -> None:
    api = FakeApi({group_of(scheduler): groups, PODS: {"items": [{"metadata": {}}]}})
    with pytest.raises(InputError, match="no PodGroup for PyTorchJob job, which was deleted"):
        check_gang(api, spec(scheduler), JOB)
    assert api.deleted() == [JOB_PATH]


@pytest.mark.parametrize("scheduler", list(GROUPS))
def test_a_pod_group_or_pods_in_one_are_accepted(scheduler: str) -> None:
    _, _, part, mark = GROUPS[scheduler]
    marked = {"items": [{"metadata": {"labels": {}, part: {mark: "job"}}}]}
    group = group_of(scheduler)
    for api in (FakeApi({group: {}}), FakeApi({group: 403, PODS: marked})):
        check_gang(api, spec(scheduler), JOB)
        assert api.deleted() == []


@pytest.mark.parametrize(
    ("job", "groups", "deleted"),
    [(TAKEN_UP, 404, True), (TAKEN_UP, 403, False), (JOB, 404, False), (OVER, 404, False)],
    ids=["taken up", "not ours to see", "not looked at", "over"],
)
def test_a_missing_pod_group_counts_once_the_operator_has_handled_the_job(
    monkeypatch: pytest.MonkeyPatch, job: Object, groups: int, deleted: bool
) -> None:
    monkeypatch.setattr(gangs, "GANG_SECONDS", 0.0)
    review = {"status": {"allowed": groups == 404}}
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    known = {PODS: {"items": []}, JOB_PATH: job, reviews: review}
    api = FakeApi({group_of("volcano"): groups, **known})
    if deleted:
        with pytest.raises(InputError, match="--gang-scheduler-name"):
            check_gang(api, spec("volcano"), JOB)
    else:
        check_gang(api, spec("volcano"), JOB)
    assert bool(api.deleted()) == deleted


def test_a_cancelled_run_waits_for_no_pod_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "sleep")
    api = FakeApi({PODS: {"items": []}})
    check_gang(api, spec("volcano"), JOB, stopped=lambda: True)
    assert api.deleted() == []


GANG = {**JOB, "spec": {"runPolicy": {"schedulingPolicy": {"queue": "team"}}}}
NOT_READY = {"lastTransitionTime": "2026-11-27T10:00:09Z", "message": "2/0 tasks in gang"}
EARLIER = {"lastTransitionTime": "2026-11-27T10:00:01Z", "message": "earlier"}
NOT_FIT = {
    "spec": {"queue": "team"},
    "status": {"phase": "Pending", "conditions": [NOT_READY, EARLIER]},
}


@pytest.mark.parametrize(
    ("scheduler", "group", "queue", "text"),
    [
        ("volcano", NOT_FIT, {"status": {"state": "Open"}}, "Pending in queue team (2/0 tasks"),
        ("volcano", NOT_FIT, {"status": {"state": "Closed"}}, "queue team, which is Closed (2/0"),
        ("volcano", NOT_FIT, 404, "queue team, which does not exist"),
        ("volcano", NOT_FIT, 403, "Pending in queue team (2/0 tasks"),
        ("volcano", {}, 404, "is not handled yet"),
        ("coscheduling", {"status": {"phase": "Scheduling"}}, 404, "is Scheduling"),
        ("volcano", 403, 404, "the operator has not created them"),
    ],
)
def test_a_job_waits_for_its_pod_group(scheduler: str, group: Any, queue: Any, text: str) -> None:
    queues = "/apis/scheduling.volcano.sh/v1beta1/queues/team"
    group = {"spec": {}, **group} if isinstance(group, dict) else group
    api = FakeApi({group_of(scheduler): group, queues: queue})
    assert text in summary(explain(GANG, State("created"), [], [], api))
    assert explain(JOB, State("created"), [], [], FakeApi()) == {
        NO_PODS: Reason("", "the operator has not created them")
    }
