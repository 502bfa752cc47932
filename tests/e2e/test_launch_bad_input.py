"""Errors before anything is created, and the output of `manifest`."""

import copy
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.check_job import check
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.leftovers import leftovers
from tests.e2e.harness.programs import kfp_ddp, kubectl
from tests.e2e.harness.rights import act_as
from tests.e2e.harness.scene import namespace

pytestmark = pytest.mark.smoke

ALL = list(KINDS)
SCRIPT = {"image": "ghcr.io/you/trainer:1.0", "script": "print(1)", "nodes": 2}
WARNING = "3 nvidia.com/gpu a node are requested and no node has more than 0; the job waits"
COMMAND = ["image=ghcr.io/you/trainer:1.0", "command=[python3, train.py]", "nodes=2"]


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    with namespace(cluster, ours=False) as space:
        yield space


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"claims": {"/data": "nowhere:ro"}}, "claim nowhere does not exist in namespace"),
        ({"scheduler": "kueue", "queue": "nowhere"}, "nowhere"),  # no such queue, or no Kueue
    ],
)
def test_missing_pvc_or_queue_fails_before_a_job_is_created(
    grounds: Grounds, kind: str, fields: dict[str, Any], says: str
) -> None:
    assert says in refused(Api(grounds.api, grounds.namespace), {**fields, "kind": kind})
    assert leftovers(grounds) == set()


@pytest.mark.parametrize("kind", ALL)
def test_missing_rights_fail_before_a_job_is_created(grounds: Grounds, kind: str) -> None:
    with act_as(grounds.api, grounds.namespace, "default") as nobody:
        line = refused(Api(nobody, grounds.namespace), {"kind": kind})
    assert f"no right to list {KINDS[kind].plural} in namespace {grounds.namespace}" in line
    assert "apply deploy/rbac" in line
    assert leftovers(grounds) == set()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "gpus",
    [{"gpus_per_node": 3}, {"resources": {"limits": {"nvidia.com/gpu": "3"}}}],
    ids=["own", "of the task"],
)
def test_missing_gpus_are_a_warning(grounds: Grounds, kind: str, gpus: dict[str, Any]) -> None:
    """Nodes may be added when a job asks for them, so it is not refused."""
    spec = LaunchSpec.create(**SCRIPT, **gpus, kind=kind)
    (warning,) = check(Api(grounds.api, grounds.namespace), spec)
    assert warning.startswith(WARNING)
    assert "\n" not in warning


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "settings",
    [COMMAND, ["image=a:1", "script=print('$HOME ∑')"], [*COMMAND, "gpus_per_node=8", "cpu=4"]],
    ids=["command", "script", "gpus"],
)
def test_the_output_of_manifest_is_valid(grounds: Grounds, kind: str, settings: list[str]) -> None:
    printed = kfp_ddp("manifest", kind, *settings, "--namespace", grounds.namespace)
    assert printed.returncode == 0, printed.stderr
    dry = ("-n", grounds.namespace, "apply", "--dry-run=server", "-f", "-")
    applied = kubectl(*dry, "--validate=strict", text=printed.stdout)
    assert "created (server dry run)" in applied
    *maps, job = yaml.safe_load_all(printed.stdout)
    assert [item["data"]["script.py"] for item in maps] == scripts(settings)
    for template in templates(job):
        volumes = template["spec"].get("volumes", [])
        named = [item["configMap"]["name"] for item in volumes if "configMap" in item]
        assert named == [item["metadata"]["name"] for item in maps]
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = "of-the-job"
        kubectl(*dry, text=yaml.safe_dump(pod))
    assert leftovers(grounds) == set()


def refused(api: Api, fields: dict[str, Any]) -> str:
    """The one line that a launch ends with."""
    with pytest.raises(InputError) as error:
        launch(LaunchSpec.create(**{**SCRIPT, **fields}), str(uuid.uuid4()), "train", "", api)
    line = str(error.value)
    assert "\n" not in line
    return line


def scripts(settings: list[str]) -> list[str]:
    return [text.partition("=")[2] for text in settings if text.startswith("script=")]


def templates(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a job of the training operator, of which it says nothing itself."""
    specs = (value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    return [replica["template"] for spec in specs for replica in spec.values()]
