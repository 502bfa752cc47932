"""A small trained model, as the train step leaves one behind, and buckets."""

import functools
import json
import shutil
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from google.cloud import storage
from PIL import Image

from kfp_ddp.local import demo as demo_bucket
from kfp_ddp.models.registry import client
from kfp_ddp.pictures.splits import scan
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from kfp_ddp.training.data.loader import evaluation_batches
from kfp_ddp.training.model.networks import build, normalise
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint
from tests.evaluations import Trained
from tests.gcs_server import Bucket, serve
from tests.registry_server import server as registry
from tests.training_ranks import dataset

CLASSES = ("blue", "green", "red")
SIZE = 16


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset, which no test changes."""
    return dataset(tmp_path_factory.mktemp("small") / "data")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as the ranks of tests do; more threads would also wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy coloured squares in three classes, a train and a val split, a recorded digest."""
    folder = tmp_path_factory.mktemp("trained") / "data"
    draw = torch.Generator().manual_seed(7)
    for split, count in (("train", 40), ("val", 15)):
        for number, name in enumerate(CLASSES):
            side = folder / split / name
            side.mkdir(parents=True)
            for i in range(count + number):
                noise = torch.rand(SIZE, SIZE, 3, generator=draw) * 150
                noise[..., 2 - number] += 6
                pixels = noise.to(torch.uint8).numpy()
                Image.fromarray(pixels).save(side / f"{i:03}.png")
    (folder / "_SUCCESS").write_text("ab" * 32 + "\n")
    return folder


@pytest.fixture(scope="session")
def trained_checkpoint(trained_dataset: Path) -> Path:
    """A ResNet-8 that tells most of them, below its run's `checkpoints`."""
    return train(trained_dataset, trained_dataset.parent / "run")


@pytest.fixture(scope="session")
def blurred_checkpoint(trained_dataset: Path) -> Path:
    """The same with filters before its strides."""
    return train(trained_dataset, trained_dataset.parent / "blurred", blur_pool=True)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[storage.Client]:
    """The emulator that the demo uses, HTTP/1.0 and one thread, with the bucket `models`."""
    with demo_bucket.serve() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        client = storage.Client()
        client.create_bucket("models")
        yield client
        client.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that breaks on demand; STORAGE_EMULATOR_HOST names its server."""
    made = Bucket()
    with serve(made) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield made


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty destination of each kind."""
    if request.param == "bucket":
        request.getfixturevalue("emulator")
        return open_store("gs://models/exports")
    (tmp_path / "exports").mkdir()
    return open_store(str(tmp_path / "exports"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server of our own."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    put, at_once = S3Response.put_object, threading.Lock()

    def put_object(self: Any) -> Any:
        with at_once:  # S3 lets no other write between its look at a condition and the write
            return put(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_object)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 server that has an empty bucket and nothing else."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    requests.post(f"{s3_server}/moto-api/reset", timeout=10).raise_for_status()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()


@pytest.fixture
def trained(trained_checkpoint: Path, trained_dataset: Path, tmp_path: Path) -> Trained:
    """This training, with a run folder of the test's own that has its metrics."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    shutil.copy(trained_checkpoint.parents[1] / "metrics.jsonl", run_dir)
    return Trained(trained_checkpoint, run_dir, trained_dataset)


def train(source: Path, run_dir: Path, blur_pool: bool = False, steps: int = 40) -> Path:
    """Train a ResNet-8 on the images of `train`, and return the checkpoint."""
    config = TrainConfig(
        data=str(source),
        val_fraction=0,
        output_dir=str(run_dir),
        model="cifar_resnet8",
        image_size=SIZE,
        epochs=6,
        warmup_epochs=0,
        batch_size=32,
        blur_pool=blur_pool,
    )
    torch.manual_seed(0)
    index = scan(source / "train")
    network = build(config.model, len(index.classes), blur_pool)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    events = []
    images, classes, *_ = next(evaluation_batches(index, SIZE, len(index)))
    targets = torch.tensor(classes)
    for step in range(1, steps + 1):
        picks = torch.randperm(len(index))[:64]
        loss = torch.nn.functional.cross_entropy(network(normalise(images[picks])), targets[picks])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        events.append({"event": "step", "step": step, "epoch": step / 8, "loss": loss.item()})
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return checkpoint.write(
        run_dir / "checkpoints",
        40,
        {"model": network.state_dict(), "ema": None},
        checkpoint.manifest_of(config, index.classes, epoch=6, world_size=1),
    )


@pytest.fixture
def registry_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[registry.RegistryServer]:
    """Yield an empty registry server, and check that each request kept to the contract.

    The client does not retry, so what one fault causes does not depend on time: a retry would
    complete an operation whose answer was lost. A test of retries sets `PATIENCE` itself.
    """
    monkeypatch.setattr(client, "PAUSE", 0.01)
    monkeypatch.setattr(client, "PATIENCE", 0.0)
    monkeypatch.setattr(client, "LOOK", 0.0)
    # Its client reads all certificate authorities for each connection, those of HTTP too.
    monkeypatch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
    with registry.serve() as server:
        yield server
    assert not server.violations
