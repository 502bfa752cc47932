"""What deploy/storage offers: the rights of a profile's own account, and the examples."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets.volume.cluster import GCP_SOURCES, Cluster, Refused
from kfp_ddp.datasets.volume.publish import collect, publish
from kfp_ddp.k8s.api import Api
from tests.e2e.harness.grounds import until, wait_for_end
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.volumes import Ground, ground, request
from tests.e2e.harness.workflow import define_kind

pytestmark = pytest.mark.smoke

__all__ = ["ground"]

STORAGE = Path(__file__).parents[2] / "deploy" / "storage"
COMPONENT = """
from types import SimpleNamespace
from kfp_ddp.components.dataset_volume.component import dataset_volume
done = dataset_volume.python_func(volume_report=SimpleNamespace(path="/tmp/report.md"), **{inputs})
print(done.claim, done.path)
"""


@contextlib.contextmanager
def applied(ground: Ground, folder: Path) -> Iterator[None]:
    """`kubectl apply -k deploy/storage`, with the namespace set as its first line says."""
    for name in ("kustomization.yaml", "rbac.yaml"):
        text = (STORAGE / name).read_text()
        if name == "kustomization.yaml":
            assert "\nnamespace: kubeflow\n" in text
            text = text.replace("\nnamespace: kubeflow\n", f"\nnamespace: {ground.namespace}\n")
        (folder / name).write_text(text)
    kubectl("apply", "-k", str(folder), "--validate=strict")
    try:
        yield
    finally:
        kubectl("delete", "-k", str(folder), "--wait=false")


@contextlib.contextmanager
def populator_api(api: client.ApiClient) -> Iterator[None]:
    """The API of GKE's volume populator, with nothing behind it."""
    name = define_kind(api, "datalayer.gke.io/v1", "GCPDataSource")
    try:
        until(lambda: _served(Cluster(Api(api, "default"))), "the new API")
        yield
    finally:
        client.ApiextensionsV1Api(api).delete_custom_resource_definition(name)


def test_account_of_a_profile_can_do_all_with_deploy(ground: Ground, tmp_path: Path) -> None:
    editor = ground.account_with(name="default-editor")
    staging = ground.staging("standard")
    with pytest.raises(StorageError, match="cannot get claim"):
        publish(editor, request(staging, "2" * 64, publish="auto"))
    with applied(ground, tmp_path):
        result = publish(editor, request(staging, "2" * 64, publish="auto"))
        assert (result.strategy, result.claim) == ("snapshot", "ds-digits-222222222222")
        assert "has a snapshot class" in result.notes[0]
        assert not any("cannot be seen" in note for note in result.notes)
        for digit in "34":
            demand = request(staging, digit * 64, publish="clone", keep_claims=1)
            result = publish(editor, demand)
        assert set(collect(editor, demand, result.claim)) == {
            "ds-digits-222222222222", "ds-digits-333333333333",
        }  # fmt: skip
    with pytest.raises(StorageError, match="cannot get claim"):
        publish(editor, request(staging, "2" * 64, publish="auto"))


def test_populator_creates_the_objects_of_the_gke_docs(ground: Ground, tmp_path: Path) -> None:
    """From the component's own inputs, in a pod, as a step of a pipeline."""
    source = "gs://bucket/ds"
    inputs = {
        "dataset": "digits", "digest": "7" * 64, "path": "/data/versions/777777777777",
        "claim": ground.staging("late"), "publish": "populator", "source": source,
        "options": {"populator_account": "reader"},
    }  # fmt: skip
    demand = request(str(inputs["claim"]), "7" * 64, publish="populator", source=source)
    with pytest.raises(StorageError, match=r"cannot create gcpdatasources .*deploy/storage"):
        publish(ground.stock, demand)
    with populator_api(ground.api), applied(ground, tmp_path):
        name = "ds-digits-777777777777"
        assert ground.run(COMPONENT.format(inputs=inputs)).endswith(f"{name} /data")
        source_object = ground.admin.get(GCP_SOURCES, name)
        assert source_object is not None
        assert source_object["spec"]["cloudStorage"] == {
            "uri": "gs://bucket/ds/", "serviceAccountName": "reader",
        }  # fmt: skip
        claim = ground.claim(name)
        assert claim.spec.access_modes == ["ReadOnlyMany"]
        assert claim.spec.data_source_ref.kind == "GCPDataSource"
        assert claim.metadata.annotations["kfp-ddp.dev/source"] == source
        ground.core.delete_namespaced_persistent_volume_claim(name, ground.namespace)


def test_init_container_example_runs(ground: Ground) -> None:
    (pod,) = yaml.safe_load_all((STORAGE / "init-container.yaml").read_text())
    spec = pod["spec"]
    spec["volumes"][0]["persistentVolumeClaim"]["claimName"] = ground.staging("standard")
    command = spec["initContainers"][0]["command"]
    assert command[-2] == "gs://bucket/photos"
    command[-2] = "/usr/share/zoneinfo/Europe"  # what every image has; no bucket is in reach
    command.insert(3, "--symlinks=follow")
    ground.core.create_namespaced_pod(ground.namespace, pod)
    name = pod["metadata"]["name"]
    assert wait_for_end(ground.grounds, name) == "Succeeded"
    log = ground.core.read_namespaced_pod_log(name, ground.namespace, container="main")
    assert "Vienna" in log
    assert len(log.splitlines()[-1]) == 64


def test_examples_are_valid(ground: Ground) -> None:
    for name in ("claims.yaml", "snapshot-class.yaml", "init-container.yaml", "chown.yaml"):
        for document in yaml.safe_load_all((STORAGE / name).read_text()):
            resource = _resource(document, ground.namespace)
            document["metadata"]["name"] += "-example"
            ground.api.call_api(
                resource,
                "POST",
                body=document,
                query_params=[("dryRun", "All"), ("fieldValidation", "Strict")],
                auth_settings=["BearerToken"],
            )


def _resource(document: dict[str, Any], namespace: str) -> str:
    version, kind = document["apiVersion"], document["kind"]
    plural = kind.lower() + ("es" if kind.endswith("s") else "s")
    cluster_wide = kind.startswith("Cluster") or kind == "VolumeSnapshotClass"
    place = "" if cluster_wide else f"/namespaces/{namespace}"
    return f"/{'apis' if '/' in version else 'api'}/{version}{place}/{plural}"


def _served(admin: Cluster) -> bool:
    try:
        kind = {"apiVersion": "datalayer.gke.io/v1", "kind": "GCPDataSource"}
        admin.create(GCP_SOURCES, {**kind, "metadata": {"name": "probe"}})
    except Refused:
        return False
    return True
