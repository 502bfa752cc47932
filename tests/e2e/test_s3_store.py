"""S3 alone on a cluster that shares no storage: source, runs, destination and champion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import bucket
from tests.e2e.harness.grounds import claim
from tests.e2e.harness.scene import COMPILED, Scene
from tests.e2e.harness.training import TRAINING, WORKERS
from tests.stores import versitygw

SECRET = "kfp-ddp-bucket"


@pytest.fixture
def store(scene: Scene, tmp_path: Path) -> Iterator[Path]:
    """The folder of versitygw's buckets, one with digits, whose keys the namespace's secret has."""
    import boto3

    buckets = tmp_path / "buckets"
    buckets.mkdir()
    host = bucket.node_address(scene.grounds.api)
    with versitygw(buckets, "access", "secret", host) as url:
        s3 = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="access",
            aws_secret_access_key="secret",
        )
        for name in ("digits", "runs", "models"):
            s3.create_bucket(Bucket=name)
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
