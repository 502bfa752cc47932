"""Where a pipeline's models are evaluated, as preflight hands it on."""

from typing import Any

import pytest

from kfp_ddp.checks.form import StepResources
from kfp_ddp.checks.preflight import evaluation
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import job_fields
from kfp_ddp.jobs.launch_spec import LaunchSpec


def training(**fields: Any) -> LaunchSpec:
    return LaunchSpec.create(image="trainer", command=["true"], **fields)


def test_by_default_the_step_evaluates_with_its_own_gpus() -> None:
    found = evaluation(StepResources.create(evaluate_gpus=2), training(nodes=8))
    assert found == {"evaluate_backend": "local", "evaluate_job": {}, "evaluate_gpus": "2"}
    assert evaluation(StepResources.create(), training())["evaluate_gpus"] == ""


def test_a_job_that_evaluates_is_as_large_as_was_set_and_else_like_that_which_trains() -> None:
    steps = StepResources.create(
        evaluate_backend="trainjob",
        evaluate_nodes=2,
        evaluate_gpus=4,
        evaluate_memory="64Gi",
    )
    spec = training(
        nodes=8,
        gpus_per_node=8,
        cpu="90",
        nproc_per_node=8,
        node_selector={"gpu": "h100"},
        retries=3,
    )
    found = evaluation(steps, spec)
    assert (found["evaluate_backend"], found["evaluate_gpus"]) == ("trainjob", "")
    assert found["evaluate_job"] == {
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
    fields = job_fields(found["evaluate_job"], "other", "trainjob")
    assert LaunchSpec.create(**fields, command=["true"]).processes() == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"evaluate_nodes": 2}, "evaluate_nodes=2: the step itself is one node"),
        ({"evaluate_nodes": 0, "evaluate_backend": "pytorchjob"}, "evaluate_nodes"),
        ({"evaluate_backend": "tfjob"}, "evaluate_backend"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        StepResources.create(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("job", "backend", "says"),
    [
        ({"nodes": 2}, "local", "nodes=2: backend local has one node"),
        ({}, "tfjob", "backend 'tfjob' is not known"),
        ({"command": ["true"]}, "pytorchjob", "command"),
        ({"elastic": "1:4"}, "pytorchjob", "elastic"),
        ({"node": 2}, "pytorchjob", "node"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_anything_is_made(
    job: dict[str, Any], backend: str, says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        job_fields(job, "trainer", backend)
    assert "\n" not in str(caught.value)
