"""Pipelines without shared storage: runs in GCS or S3, data on each node or on a clone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import bucket
from tests.e2e.harness.grounds import claim
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import ARTIFACTS, COMPILED, Scene
from tests.e2e.harness.training import TRAINING, WORKERS
from tests.stores import versitygw

RUNS = "runs"
SECRET = "kfp-ddp-bucket"


@pytest.fixture(scope="module", autouse=True)
def runs(bucket_url: str) -> None:
    """The bucket of runs."""
    bucket.make(bucket_url, RUNS)


def compiled(name: str) -> Path:
    return COMPILED.with_name(f"{name}.yaml")


def claims(pod: Any) -> set[str]:
    """Return the PVCs of a pod, without that of artifacts."""
    sources = (volume.persistent_volume_claim for volume in pod.spec.volumes)
    return {source.claim_name for source in sources if source} - {ARTIFACTS}


def pods(scene: Scene, run: Run) -> list[Any]:
    """Return the pods of the steps and of the job."""
    items = scene.grounds.core.list_namespaced_pod(scene.grounds.namespace).items
    ours = [pod for pod in items if (pod.metadata.labels or {}).get("pipeline/runid") == run.id]
    return [*ours, *scene.grounds.workers(run.id)]


def in_bucket(url: str, run: Run) -> set[str]:
    """Return the files of the run's task."""
    split = (name.split("/", 3) for name in bucket.names(url, RUNS))
    return {parts[3] for parts in split if parts[1] == run.id and len(parts) > 3}


@pytest.mark.parametrize(
    "backend", [pytest.param("pytorchjob", marks=pytest.mark.smoke), "trainjob"]
)
def test_two_nodes_without_pvc(scene: Scene, bucket_url: str, backend: str) -> None:
    run = scene.run(
        compiled("train_resnet_claimless"),
        **TRAINING | {"destination": f"gs://{bucket.MODELS}/claimless-{backend}"},
        work=f"gs://{RUNS}/prefix",
        backend=backend,
        nodes=2,
        job={**WORKERS, "nproc_per_node": 1},
    ).play()

    assert run.succeeded, run.explain()
    assert len(scene.grounds.workers(run.id)) == 2
    assert set().union(*map(claims, pods(scene, run))) == set()
    log = run.steps["train"].log
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in log, log
    written = in_bucket(bucket_url, run)
    assert {"metrics.jsonl", "evaluation/evaluation.json", "bundle/_SUCCESS"} <= written
    steps = {name.split("/")[1] for name in written if name.startswith("checkpoints/")}
    assert len(steps) in (2, 3)  # keep_checkpoints, and the best
    models = bucket.names(bucket_url, bucket.MODELS)
    assert any(name.startswith(f"claimless-{backend}/digits/") for name in models)


@pytest.fixture
def store(scene: Scene, tmp_path: Path) -> Iterator[Path]:
    """The folder of versitygw's buckets, one with digits, whose keys the namespace's secret has."""
    import boto3

    buckets = tmp_path / "buckets"
    for name in ("digits", "runs", "models"):
        (buckets / name).mkdir(parents=True)
    host = bucket.node_address(scene.grounds.api)
    with versitygw(buckets, "access", "secret", host) as url:
        s3 = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="access",
            aws_secret_access_key="secret",
        )
        for name, content in bucket.digits():
            s3.put_object(Bucket="digits", Key=name, Body=content)
        s3.close()
        values = {
            "AWS_ACCESS_KEY_ID": "access",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": url,
        }
        body = client.V1Secret(metadata=client.V1ObjectMeta(name=SECRET), string_data=values)
        scene.grounds.core.create_namespaced_secret(scene.grounds.namespace, body)
        yield buckets
        scene.grounds.core.delete_namespaced_secret(SECRET, scene.grounds.namespace)


def test_a_read_write_once_pvc_and_s3_are_enough(scene: Scene, store: Path) -> None:
    claim(scene.grounds, "one-node", mode="ReadWriteOnce")
    given: dict[str, Any] = TRAINING | {
        "source": "s3://digits",
        "work": "s3://runs/prefix",
        "destination": "s3://models/all",
        "champion": "last",
        "sync": {"dataset": "s3", "claim": "one-node", "publish": "clone"},
        "job": {**WORKERS, "nproc_per_node": 1},
    }
    pipeline = COMPILED.with_name("train_resnet_bucket.yaml")

    first = scene.run(pipeline, **given).play()
    assert first.succeeded, first.explain()
    published = first.steps["dataset-volume"].outputs["claim"]
    (worker,) = scene.grounds.workers(first.id)
    assert claims(worker) == {published}
    assert set().union(*map(claims, pods(scene, first))) == {"one-node", published}
    champion = store / "models" / "all" / "digits" / "CHAMPION"
    before = champion.read_text().strip()
    assert (champion.parent / before / "_SUCCESS").is_file()
    assert list((store / "runs" / "prefix" / first.id).glob("*/checkpoints/step-*/manifest.json"))

    gate = {"min_accuracy": 0.85, "min_improvement": -1.0}
    second = scene.run(pipeline, **given | {"epochs": 25, "gate": gate}).play()
    assert second.succeeded, second.explain()
    assert second.steps["gate"].outputs["champion_version"] == before
    after = champion.read_text().strip()
    assert after != before
    assert (champion.parent / after / "_SUCCESS").is_file()
