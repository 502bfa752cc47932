"""Export of one's own model, and the upload of bundles."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from google.cloud import storage

from kfp_ddp.components.export.component import export
from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import publish
from kfp_ddp.models import bundle, weights
from kfp_ddp.storage import store
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.state import checkpoint
from tests.evaluations import Trained
from tests.exports import arguments
from tests.gcs_server import Bucket
from tests.integration.export.test_step import run_example
from tests.tolerance import assert_computed_alike

CLASSES = ("blue", "green", "red")
OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features, self.fc = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, classes)

    def forward(self, x):
        features = torch.relu(self.features(x)).mean((2, 3))
        # no such operator in ONNX
        return self.fc(features + 1e-3 * torch.linalg.svdvals(x.mean(1))[:, :8])


build = Net
"""
BRANCH = OWN.replace(
    "        return",
    "        if features.sum() > 0:\n            features = 2 * features\n        return",
)


def saved(trained: Trained, folder: Path, text: str) -> Trained:
    """Return an evaluated training of a network of a file."""
    known = checkpoint.verify(trained.checkpoint).fields["config"]
    own = {"model": "mine.py:build", "model_code": packed.pack(text.encode()), "fit": "pad"}
    config = TrainConfig.create(**{**known, **own}).model_dump()
    mean = (0.5,) * 3
    torch.manual_seed(0)
    network = checkpoint.ModelInfo(own["model"], CLASSES, 16, mean, mean, 1, config).network()
    trained = trained._replace(run_dir=folder).rewritten(
        folder / "checkpoints", lambda _: network.state_dict(), config=config, model=own["model"]
    )
    trained.evaluate(worst=4)
    return trained


@pytest.fixture(scope="module")
def made(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """A training with checkpoint, evaluation and bundle."""
    folder = tmp_path_factory.mktemp("own")
    made = saved(Trained(trained_checkpoint, folder, trained_dataset), folder, OWN)
    made.export()
    return made


def test_an_unsupported_format_is_reported_and_left_out(made: Trained) -> None:
    folder = made.bundle
    assert bundle.intact(folder)
    names = bundle.files(folder)
    assert {"model.pt2", "model.safetensors", "network.py"} < set(names)
    assert not [name for name in names if "onnx" in name or name.startswith("serving/")]
    parity: dict[str, Any] = json.loads((folder / "parity.json").read_text())
    assert set(parity["formats"]) == {"model.safetensors", "model.pt2"}
    assert list(parity["left_out"]) == ["model.onnx"]
    assert re.search("linalg_svd", parity["left_out"]["model.onnx"])
    assert "\n" not in parity["left_out"]["model.onnx"]
    assert json.loads((folder / "signature.json").read_text())["left_out"] == parity["left_out"]
    card = (folder / "README.md").read_text()
    assert "`model.onnx` is left out, as the model cannot be written in it" in card
    assert not re.search("onnxruntime|KServe|ONNX opset", card)


@pytest.mark.slow
def test_the_example_in_the_card_runs(made: Trained) -> None:
    preprocessing = json.loads((made.bundle / "signature.json").read_text())["preprocessing"]
    assert (preprocessing["fit"], preprocessing["short_side"]) == ("pad", 16)
    run_example(made)


def test_the_bundle_is_enough_to_build_the_network(made: Trained) -> None:
    folder = made.bundle
    network, info = weights.read(folder / "model.safetensors", 40, allow_code=True)
    reference, _ = checkpoint.load_model(made.checkpoint)
    images = torch.rand(3, 3, 16, 16)
    assert_computed_alike(network(images), reference(images))
    assert (info.model, info.classes) == ("mine.py:build", CLASSES)
    assert (folder / "network.py").read_text() == OWN
    digest = json.loads((folder / "config.json").read_text())["model_sha256"]
    assert f"| network.py sha256 | `{digest}` |" in (folder / "README.md").read_text()
    assert f"{digest}  network.py" in (folder / "MANIFEST.sha256").read_text()


def test_the_artifact_lists_the_formats(made: Trained, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(made.run_dir, tmp_path / "run"))
    given = arguments(made._replace(run_dir=run_dir), tmp_path)
    assert bundle.intact(Path(export.python_func(**given)))
    assert given["exported_model"].metadata["formats"] == "model.pt2, model.safetensors"
    assert "`model.onnx` is left out" in (tmp_path / "summary").read_text()


def test_an_unsupported_network_has_no_bundle(trained: Trained, tmp_path: Path) -> None:
    own = saved(trained, tmp_path, BRANCH)
    with pytest.raises(InputError, match=r"^mine\.py:build can be written neither as"):
        own.export()
    assert not own.bundle.exists()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A small bundle whose files are no model."""
    folder = tmp_path / "bundle"
    (folder / "serving" / "m" / "1").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(bytes(range(256)) * 40_000)  # beyond the multipart limit
    (folder / "empty").write_bytes(b"")
    (folder / "serving" / "m" / "1" / "model.onnx").write_bytes(b"small")
    bundle.seal(folder)
    return folder


def test_a_second_upload_writes_nothing(emulator: storage.Client, sealed: Path) -> None:
    where = open_store("gs://models/exports/")
    where.prepare()
    uri, _ = publish(sealed, "squares", where, "")
    assert uri == f"gs://models/exports/squares/{bundle.version(sealed)}"

    def objects() -> dict[str, tuple[bytes, Any]]:
        blobs = emulator.list_blobs("models")
        return {blob.name: (blob.download_as_bytes(), blob.time_created) for blob in blobs}

    first = objects()
    history = {name: first[name][0] for name in ["exports/squares/CHAMPIONS"]}
    prefix = uri.removeprefix("gs://models/") + "/"
    pointer = f"{bundle.version(sealed)}\n".encode()
    assert first["exports/squares/CHAMPION"][0] == pointer
    assert {name.removeprefix(prefix): content for name, (content, _) in first.items()} == {
        name: (sealed / name).read_bytes() for name in bundle.files(sealed)
    } | {"exports/squares/CHAMPION": pointer, **history}
    assert publish(sealed, "squares", where, "") == (uri, "")
    assert objects() == first


def test_success_is_uploaded_last(bucket: Bucket, sealed: Path) -> None:
    publish(sealed, "squares", open_store("gs://bucket"), "")
    last = [name.rpartition("/")[2] for name in bucket.writes[-4:]]
    assert last == ["MANIFEST.sha256", "_SUCCESS", "CHAMPIONS", "CHAMPION"]
    assert len(bucket.writes) == len(bundle.files(sealed)) + 2


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    ("fault", "text"),
    [("forbidden", "no permission"), ("race", "changed by another writer"), ("damage", "damaged")],
)
def test_a_failed_upload_is_completed_by_the_next(
    bucket: Bucket, sealed: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str, after: int
) -> None:
    monkeypatch.setattr(store, "PATIENCE", 2.0)
    bucket.write_fault, bucket.write_fault_after = fault, after
    with pytest.raises((InputError, StorageError), match=text):
        bundle.upload(sealed, "squares", open_store("gs://bucket/exports"))
    assert not any(name.endswith("_SUCCESS") for name in bucket.objects)

    bucket.write_fault = ""
    uri = bundle.upload(sealed, "squares", open_store("gs://bucket/exports"))
    prefix = uri.removeprefix("gs://bucket/")
    for name in bundle.files(sealed):
        assert bucket.objects[f"{prefix}/{name}"].data == (sealed / name).read_bytes()


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(InputError, match="there are no credentials for gs://bucket"):
        open_store("gs://bucket").prepare()
