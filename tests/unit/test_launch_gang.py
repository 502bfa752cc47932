"""Gangs of Volcano and coscheduling: who will not start pods together is told, before and after."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import gang
from kfp_ddp.jobs.check_job import gang_scheduling
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, ApiError, Object

GROUPS = {
    "volcano": ("scheduling.volcano.sh", "v1beta1", "annotations", "scheduling.k8s.io/group-name"),
    "coscheduling": ("scheduling.x-k8s.io", "v1alpha1", "labels", "scheduling.x-k8s.io/pod-group"),
}
OPERATORS = {"volcano": "Volcano", "coscheduling": "scheduler-plugins-scheduler"}
JOB: Object = {"metadata": {"name": "job"}, "status": {"conditions": []}}
JOB_PATH = "/apis/kubeflow.org/v1/namespaces/space/pytorchjobs/job"
PODS = "/api/v1/namespaces/space/pods"
TAKEN_UP = {**JOB, "status": {"conditions": [{"type": "Created", "status": "True"}]}}
OVER = {**JOB, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}


class Server(Api):
    """Answers from a table: an object, or the status of a refusal; 404 where nothing is said."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(None, "space")
        self.answers = answers
        self.deleted: list[str] = []

    def retry(self, request: Any, seconds: float = 300, also: tuple[int, ...] = ()) -> Any:
        return request()

    def call(self, method: str, path: str, *_: Any, **__: Any) -> Object:
        if method == "DELETE":
            self.deleted.append(path)
        answer = self.answers.get(path, 404)
        if isinstance(answer, int):
            raise ApiError(answer, "", "no")
        found: Object = answer
        return found


def spec(scheduler: str) -> LaunchSpec:
    return LaunchSpec.create(image="a:1", command=["true"], scheduler=scheduler)


def served(scheduler: str) -> dict[str, Any]:
    group, version, _, _ = GROUPS[scheduler]
    return {f"/apis/{group}/{version}": {}}


def group_of(scheduler: str) -> str:
    group, version, _, _ = GROUPS[scheduler]
    return f"/apis/{group}/{version}/namespaces/space/podgroups/job"


def operator(*arguments: str) -> dict[str, Any]:
    container = {"command": ["/manager"], "args": list(arguments)}
    return {"/api/v1/pods": {"items": [{"spec": {"containers": [container]}}]}}


@pytest.mark.parametrize("scheduler", list(GROUPS))
def test_a_cluster_that_has_no_pod_groups_is_told_of(scheduler: str) -> None:
    said = gang_scheduling(Server({}), spec(scheduler))
    assert said.startswith(f"scheduler={scheduler}: this cluster has no PodGroups of ")
    assert GROUPS[scheduler][0] in said
    assert "\n" not in said


@pytest.mark.parametrize("scheduler", list(GROUPS))
@pytest.mark.parametrize("spelling", ["--gang-scheduler-name={}", "-gang-scheduler-name={}", "{}"])
def test_an_operator_that_makes_gangs_of_another_or_none_is_told_of(
    scheduler: str, spelling: str
) -> None:
    def said(name: str) -> str:
        words = [spelling.format(name)]
        told = ["--gang-scheduler-name", *words] if spelling == "{}" else words
        return gang_scheduling(Server(served(scheduler) | operator(*told)), spec(scheduler))

    (another,) = OPERATORS.keys() - {scheduler}
    assert said(OPERATORS[scheduler]) == ""
    assert f"runs with --gang-scheduler-name={OPERATORS[another]}" in said(OPERATORS[another])
    without = gang_scheduling(Server(served(scheduler) | operator()), spec(scheduler))
    assert "runs without --gang-scheduler-name" in without
    assert "start it with --gang-scheduler-name=" in without


@pytest.mark.parametrize("scheduler", ["", "kueue", "runai"])
def test_who_asks_for_no_gang_is_told_nothing(scheduler: str) -> None:
    assert gang_scheduling(Server({}), spec(scheduler)) == ""
    gang.check_gang(Server({}), spec(scheduler), JOB)


@pytest.mark.parametrize("scheduler", list(GROUPS))
@pytest.mark.parametrize("operators", [403, {"items": []}])
def test_an_operator_that_is_not_seen_is_judged_by_what_it_makes(
    scheduler: str, operators: Any
) -> None:
    api = Server(served(scheduler) | {"/api/v1/pods": operators})
    assert gang_scheduling(api, spec(scheduler)) == ""
    assert "is unknown here; a job for which" in gang.unsure(api, spec(scheduler))
    assert gang.unsure(Server(operator()), spec(scheduler)) == ""
    assert gang.unsure(api, spec("kueue")) == ""


@pytest.mark.parametrize("scheduler", list(GROUPS))
@pytest.mark.parametrize("groups", [404, 403])
def test_a_job_whose_pods_are_in_no_group_is_deleted_and_told_of(
    scheduler: str, groups: int
) -> None:
    api = Server({group_of(scheduler): groups, PODS: {"items": [{"metadata": {}}]}})
    with pytest.raises(
        InputError, match="created no PodGroup for PyTorchJob job, which was deleted"
    ):
        gang.check_gang(api, spec(scheduler), JOB)
    assert api.deleted == [JOB_PATH]


@pytest.mark.parametrize("scheduler", list(GROUPS))
def test_a_group_or_pods_in_one_are_what_was_asked_for(scheduler: str) -> None:
    _, _, part, mark = GROUPS[scheduler]
    marked = {"items": [{"metadata": {"labels": {}, part: {mark: "job"}}}]}
    group = group_of(scheduler)
    seen: list[dict[str, Any]] = [{group: {}}, {group: 403, PODS: marked}]
    for answers in seen:
        api = Server(answers)
        gang.check_gang(api, spec(scheduler), JOB)
        assert api.deleted == []


@pytest.mark.parametrize(
    ("job", "groups", "deleted"),
    [(TAKEN_UP, 404, True), (TAKEN_UP, 403, False), (JOB, 404, False), (OVER, 404, False)],
    ids=["taken up", "not ours to see", "not looked at", "over"],
)
def test_what_never_comes_counts_where_the_operator_has_seen_the_job(
    monkeypatch: pytest.MonkeyPatch, job: Object, groups: int, deleted: bool
) -> None:
    monkeypatch.setattr(gang, "SECONDS", 0.0)
    review = {"status": {"allowed": groups == 404}}
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answers: dict[str, Any] = {
        group_of("volcano"): groups,
        PODS: {"items": []},
        JOB_PATH: job,
        reviews: review,
    }
    api = Server(answers)
    if deleted:
        with pytest.raises(InputError, match="--gang-scheduler-name=volcano"):
            gang.check_gang(api, spec("volcano"), JOB)
    else:
        gang.check_gang(api, spec("volcano"), JOB)
    assert bool(api.deleted) == deleted


def test_a_run_that_is_cancelled_waits_for_no_group() -> None:
    api = Server({PODS: {"items": []}})
    gang.check_gang(api, spec("volcano"), JOB, stopped=lambda: True)
    assert api.deleted == []
