"""Fixtures of the tests that play pipelines; they skip, with a reason, where no cluster is up."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import urllib3
from kubernetes import client, config

from tests.e2e.harness import bucket
from tests.e2e.harness.namespace import DATA, WORK
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import Scene, make_scene
from tests.e2e.harness.training import LOOP, TRAINING, WORKERS
from tests.e2e.harness.trainings import Begin, compiled, sync_only, train_only


@pytest.fixture(scope="session")
def cluster() -> client.ApiClient:
    """The cluster that KUBECONFIG names, as its administrator."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: KUBECONFIG is not set")
    config.load_kube_config()
    api = client.ApiClient()
    try:
        client.VersionApi(api).get_code(_request_timeout=5)
    except (urllib3.exceptions.HTTPError, client.ApiException) as error:
        pytest.skip(f"no cluster answers at {api.configuration.host}: {error}")
    return api


@pytest.fixture(scope="session")
def bucket_url(cluster: client.ApiClient) -> Iterator[str]:
    """A server of buckets with the digits in it, reachable from here and from pods."""
    with bucket.serve(cluster) as url:
        bucket.fill(url)
        bucket.make(url, bucket.MODELS)
        yield url


@pytest.fixture(scope="session")
def scene(
    cluster: client.ApiClient, bucket_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """A namespace with claims of the default class, for all runs that leave it well."""
    folder = tmp_path_factory.mktemp("scene")
    with make_scene(cluster, folder, {"STORAGE_EMULATOR_HOST": bucket_url}) as staging:
        yield staging


@pytest.fixture(scope="session")
def local_run(scene: Scene) -> Run:
    """A whole run with two ranks in the train step: what every other backend is held to."""
    return scene.run(**TRAINING, backend="local", job={"nproc_per_node": 2}).play()


@pytest.fixture(scope="session")
def begin(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Begin a run of the train step alone, on the dataset that the step before it has synced."""
    folder = tmp_path_factory.mktemp("train-only")
    document = compiled(train_only, folder)
    named = {"source": TRAINING["source"], **TRAINING["sync"]}
    synced = scene.run(compiled(sync_only, folder), data_claim=DATA, **named).play()
    assert synced.succeeded, synced.explain()

    def start(
        backend: str = "pytorchjob", *, nodes: int = 2, grace: float = 0.2, **training: Any
    ) -> Run:
        return scene.run(
            document,
            grace=grace,
            dataset_path=synced.steps["data-sync"].outputs["path"],
            data_claim=DATA,
            work_claim=WORK,
            training={**LOOP, "model": "cifar_resnet8", "epochs": 20, **training},
            backend=backend,
            job={**WORKERS, "nodes": nodes, "nproc_per_node": 1},
        ).start()

    return start
