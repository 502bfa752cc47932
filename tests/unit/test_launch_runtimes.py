"""Which runtime a TrainJob is made from, also where not all of them may be looked at."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from tests.unit.test_launch_gang import Server

GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
SPACE = f"{GROUP}/namespaces/space/trainingruntimes/mine"
WHOLE = f"{GROUP}/clustertrainingruntimes/mine"
SPEC = LaunchSpec.create(image="a:1", command=["true"], kind="trainjob", runtime="mine")


def runtime(resources: dict[str, Any]) -> dict[str, Any]:
    """A runtime whose node asks for that, and whose other container for more."""
    other = {"name": "other", "resources": {"limits": {"cpu": "1"}}}
    pod = {"spec": {"containers": [other, {"name": "node", "resources": resources}]}}
    job = {"name": "node", "template": {"spec": {"template": pod}}}
    return {"spec": {"template": {"spec": {"replicatedJobs": [job]}}}}


BARE, FULL = runtime({}), runtime({"requests": {"cpu": "1"}})


@pytest.mark.parametrize(
    ("space", "whole", "kind", "has_resources"),
    [
        (BARE, FULL, "TrainingRuntime", False),
        (FULL, BARE, "TrainingRuntime", True),
        (404, BARE, "ClusterTrainingRuntime", False),
        (404, FULL, "ClusterTrainingRuntime", True),
        (403, BARE, "ClusterTrainingRuntime", False),
        (404, 403, "ClusterTrainingRuntime", True),
        (403, 403, "ClusterTrainingRuntime", True),
        (403, 404, "TrainingRuntime", True),
    ],
)
def test_a_runtime_of_the_namespace_comes_first(
    space: Any, whole: Any, kind: str, has_resources: bool
) -> None:
    """Of one that may not be looked at, nobody knows what its nodes ask for: it is left alone."""
    assert KINDS["trainjob"].find_runtime(Server({SPACE: space, WHOLE: whole}), SPEC) == (
        kind,
        has_resources,
    )


def test_a_missing_runtime_is_an_input_error() -> None:
    with pytest.raises(InputError, match="runtime 'mine' does not exist; use one of `kubectl get"):
        KINDS["trainjob"].find_runtime(Server({}), SPEC)
