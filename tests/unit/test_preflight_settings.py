"""What preflight plans and refuses: the evaluation job, the service of a release, a sweep."""

import re
from typing import Any

import pytest

from kfp_ddp.checks.form import StepResources
from kfp_ddp.checks.operators import SERVICE_VERBS, check_service
from kfp_ddp.checks.preflight import evaluation
from kfp_ddp.checks.sweep import MAX_TRIALS, Sweep, trials_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import job_fields
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.models.serving.rollout import OURS
from tests.cluster import FakeApi


def training(**fields: Any) -> LaunchSpec:
    return LaunchSpec.create(image="trainer", command=["true"], **fields)


def test_step_itself_evaluates_by_default() -> None:
    outputs = evaluation(StepResources.create(evaluate_gpus=2), training(nodes=8))
    assert outputs == {"evaluate_backend": "local", "evaluate_job": {}, "evaluate_gpus": "2"}
    assert evaluation(StepResources.create(), training())["evaluate_gpus"] == ""


def test_evaluation_job_has_its_own_size_and_the_other_settings_of_the_training() -> None:
    steps = StepResources.create(
        evaluate_backend="trainjob", evaluate_nodes=2, evaluate_gpus=4, evaluate_memory="64Gi"
    )
    spec = training(
        nodes=8,
        gpus_per_node=8,
        cpu="90",
        nproc_per_node=8,
        node_selector={"gpu": "h100"},
        retries=3,
    )
    outputs = evaluation(steps, spec)
    assert (outputs["evaluate_backend"], outputs["evaluate_gpus"]) == ("trainjob", "")
    assert outputs["evaluate_job"] == {
        "image": "trainer",
        "node_selector": {"gpu": "h100"},
        "retries": 3,
        "nodes": 2,
        "gpus_per_node": 4,
        "cpu": "4",
        "cpu_request": "250m",
        "memory": "64Gi",
        "memory_request": "1Gi",
    }
    fields = job_fields(outputs["evaluate_job"], "other", "trainjob")
    assert LaunchSpec.create(**fields, command=["true"]).processes() == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"evaluate_nodes": 2}, "evaluate_nodes=2: the step itself is one node"),
        ({"evaluate_backend": "tfjob"}, "evaluate_backend"),
    ],
)
def test_invalid_step_resources_are_one_line(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        StepResources.create(**settings)


@pytest.mark.parametrize(
    ("job", "backend", "reason"),
    [
        ({"nodes": 2}, "local", "nodes=2: backend local has one node"),
        ({"command": ["true"]}, "pytorchjob", "command"),
        ({"elastic": "1:4"}, "pytorchjob", "elastic"),
    ],
)
def test_invalid_evaluation_job_is_one_line(job: dict[str, Any], backend: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        job_fields(job, "trainer", backend)


KSERVE = "/apis/serving.kserve.io/v1beta1"
SHOP = f"{KSERVE}/namespaces/here/inferenceservices/shop"
SERVED = {KSERVE: {"resources": [{"name": "inferenceservices"}]}}
OF_OURS = {"metadata": {"labels": OURS}}


class Cluster(FakeApi):
    """A cluster with these objects by path, whose account has the rights `may`."""

    def __init__(self, objects: dict[str, Object], may: tuple[str, ...] = SERVICE_VERBS) -> None:
        super().__init__({"/readyz": {}, **objects}, "here")
        self.may = may

    def call(self, method: str, path: str, body: Any = None, *_: Any, **named: Any) -> Object:
        if method == "POST":
            verb = body["spec"]["resourceAttributes"]["verb"]
            return {"status": {"allowed": verb in self.may}}
        return super().call(method, path, body)


def test_without_a_service_the_cluster_is_not_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Api, "connect", pytest.fail)
    assert check_service({"canary_percent": 5}, "") == ""


@pytest.mark.parametrize("existing", [{}, {SHOP: OF_OURS}])
def test_service_that_exists_or_can_be_created_is_valid(
    monkeypatch: pytest.MonkeyPatch, existing: dict[str, Object]
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: Cluster({**SERVED, **existing}))
    assert check_service({"service": "shop"}, "gs://models/exports") == "shop"


@pytest.mark.parametrize(
    ("destination", "cluster", "reason"),
    [
        ("", Cluster(SERVED), "names the service shop, and no destination"),
        ("/work/exports", Cluster(SERVED), "KServe cannot read /work/exports/model: give"),
        ("gs://models", Cluster({}), "has no inferenceservices .* install KServe"),
        ("gs://models", Cluster(SERVED, SERVICE_VERBS[:-1]), "no right to patch"),
        ("gs://models", Cluster({**SERVED, SHOP: {"metadata": {}}}), "was not made by kfp-ddp"),
    ],
)
def test_service_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, destination: str, cluster: Cluster, reason: str
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: cluster)
    with pytest.raises(InputError, match=reason):
        check_service({"service": "shop"}, destination)


def test_lists_give_all_combinations_besides_explicit_trials() -> None:
    sweep = Sweep.create(
        space={"learning_rate": [0.1, 0.2], "model": ["resnet18", "resnet34"]},
        trials=[{"epochs": 3}, {"learning_rate": 0.1, "model": "resnet18"}],
    )
    assert trials_of(sweep) == [
        {"epochs": 3},
        {"learning_rate": 0.1, "model": "resnet18"},
        {"learning_rate": 0.1, "model": "resnet34"},
        {"learning_rate": 0.2, "model": "resnet18"},
        {"learning_rate": 0.2, "model": "resnet34"},
    ]


def test_samples_are_in_their_ranges_and_reproducible() -> None:
    space = {
        "learning_rate": {"min": 0.001, "max": 0.1, "log": True},
        "label_smoothing": {"min": 0, "max": 0.2},
        "epochs": {"min": 2, "max": 9},
        "optimizer": ["sgd", "adamw"],
    }
    trials = trials_of(Sweep.create(space=space, samples=40))
    assert len(trials) == 40
    assert all(0.001 <= trial["learning_rate"] <= 0.1 for trial in trials)
    low = sum(trial["learning_rate"] < 0.01 for trial in trials)
    assert 10 <= low <= 30, "half of the draws by logarithm"
    assert all(0 <= trial["label_smoothing"] <= 0.2 for trial in trials)
    assert {type(trial["epochs"]) for trial in trials} == {int}
    assert {trial["epochs"] for trial in trials} == set(range(2, 10))
    assert {trial["optimizer"] for trial in trials} == {"sgd", "adamw"}
    assert trials_of(Sweep.create(space=space, samples=40)) == trials
    assert trials_of(Sweep.create(space=space, samples=40, seed=1)) != trials


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ({}, "sweep has 0 trials, and 2 to 64 can be tried"),
        ({"space": {"epochs": [1, 1]}}, "sweep has 1 trials"),
        ({"space": {"seed": [*range(MAX_TRIALS + 1)]}}, "65 combinations, and 64"),
        ({"samples": 4}, "sweep sets samples, but no space to draw them from"),
        ({"space": {"epochs": {"min": 1, "max": 3}}}, "epochs is a range: set samples"),
        ({"space": {"epochs": 3}}, "epochs=3 should be a list of values"),
        (
            {"samples": 2, "space": {"learning_rate": {"min": 0.1, "max": 0.01}}},
            "learning_rate={'min': 0.1, 'max': 0.01} is not a range",
        ),
    ],
)
def test_invalid_sweep_is_an_error(sweep: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        trials_of(Sweep.create(**sweep))
