"""The evaluation job that preflight plans."""

from typing import Any

import pytest

from kfp_ddp.checks.form import StepResources
from kfp_ddp.checks.preflight import evaluation
from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.engine import job_fields
from kfp_ddp.jobs.launch_spec import LaunchSpec


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
def test_invalid_step_resources_fail_with_one_line_error(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        StepResources.create(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("job", "backend", "reason"),
    [
        ({"nodes": 2}, "local", "nodes=2: backend local has one node"),
        ({"command": ["true"]}, "pytorchjob", "command"),
        ({"elastic": "1:4"}, "pytorchjob", "elastic"),
    ],
)
def test_invalid_evaluation_job_fails_with_one_line_error(
    job: dict[str, Any], backend: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        job_fields(job, "trainer", backend)
    assert "\n" not in str(caught.value)
