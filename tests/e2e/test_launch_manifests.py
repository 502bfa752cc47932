"""Generated jobs of every kind: what the API server and its webhooks say, strictly."""

import copy
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client

from kfp_ddp.jobs.identity import identify, metadata
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, core
from tests.e2e.harness.scene import namespace
from tests.launch_specs import specifications
from tests.unit.test_launch_pods import templates

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def api(cluster: client.ApiClient) -> Iterator[Api]:
    with namespace(cluster) as space:
        yield Api(cluster, space.namespace)


@pytest.mark.parametrize("kind", list(KINDS))
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(data=st.data())
def test_valid_settings_are_valid_manifests(api: Api, kind: str, data: st.DataObject) -> None:
    """The operator's pods too: a job shows nothing until they cannot be created."""
    spec = data.draw(specifications(kind))
    meta = metadata(spec, identify("run", "train", "7", spec), api.namespace, 0, None)
    job = spec.job_kind.manifest(spec, meta)
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    api.call("POST", KINDS[kind].path(api.namespace), job, query)
    for template in templates(job["spec"]).values() if kind != "trainjob" else ():
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = "of-the-job"
        for named in ("serviceAccountName", "priorityClassName"):  # which would have to exist
            pod["spec"].pop(named, None)
        api.call("POST", core(api.namespace, "pods"), pod, query)
