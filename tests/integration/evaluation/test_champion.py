"""A champion stays comparable while the dataset grows."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.cloud import storage
from google.protobuf import json_format
from PIL import Image
from safetensors.torch import save_file

from kfp_ddp.core.packed import pack_text
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.export import contents
from kfp_ddp.export.publish import publish
from kfp_ddp.models import bundle, signature, weights
from kfp_ddp.models.evaluation import Evaluation, prediction_rows
from kfp_ddp.pipelines.train_resnet import train_resnet
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.model.networks import build
from kfp_ddp.training.state import checkpoint as checkpoints
from tests import gating
from tests.evaluations import Trained, run_step
from tests.tolerance import converted, near

INCOMPARABLE = "the champion was evaluated on other samples, so the two are not comparable"
PUBLISHED = "gs://models/exports/squares"


@pytest.fixture(scope="module")
def source(trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bucket at the time of the champion's training."""
    folder = tmp_path_factory.mktemp("source") / "squares"
    return Path(shutil.copytree(trained_dataset, folder, ignore=lambda *_: ["_SUCCESS"]))


@pytest.fixture(scope="module")
def exported(
    blurred_checkpoint: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The files of a champion's bundle that gate and evaluate read; evaluated on `source`."""
    folder = tmp_path_factory.mktemp("champion")
    version = sync(str(source), folder / "data", SyncOptions()).path
    champion = Trained(blurred_checkpoint, folder, version)
    champion.evaluate()
    champion.bundle.mkdir()
    network, info = checkpoints.load_model(blurred_checkpoint)
    weights.write(network, info, champion.bundle / bundle.WEIGHTS)
    bundle.write_json(champion.bundle / bundle.CONFIG, contents.describe_config(info, {}))
    shutil.copy(champion.evaluation, champion.bundle / "metrics.json")
    shutil.copy(champion.evaluation.with_name("predictions.csv"), champion.bundle)
    bundle.seal(champion.bundle)
    return champion.bundle


@pytest.fixture
def champion(exported: Path, tmp_path: Path) -> Path:
    """A copy of the bundle."""
    return Path(shutil.copytree(exported, tmp_path / "champion"))


Change = Callable[[Path], object]


class Challenger(NamedTuple):
    """A model on the version of a dataset that a sync makes after a change of the bucket."""

    trained: Trained
    folder: Path

    def changed(self, source: Path, change: Change = lambda _: None) -> "Challenger":
        bucket = Path(shutil.copytree(source, self.folder / "source"))
        change(bucket)
        version = sync(str(bucket), self.folder / "data", SyncOptions()).path
        return self._replace(trained=self.trained._replace(dataset=version))

    def untrained(self, *classes: str) -> "Challenger":
        """Return an untrained network of these classes."""
        torch.manual_seed(1)
        network = build("cifar_resnet8", len(classes)).state_dict()
        folder = self.folder / "checkpoints"
        fields = {"classes": list(classes)}
        return self._replace(trained=self.trained.rewritten(folder, lambda _: network, **fields))

    def evaluate(self, champion: object) -> Evaluation:
        return run_step(self.folder, *self.trained, champion=str(champion))[1]

    @property
    def again(self) -> Path:
        """The champion's evaluation on this split."""
        return self.trained.evaluation.parent / "champion"

    def judge(self, champion: object, **rules: float) -> tuple[bool, str]:
        path = self.trained.evaluation
        inputs: dict[str, Any] = {"evaluation": str(path), "champion": str(champion), **rules}
        return gating.judged(path.parent, Evaluation.read(path).accuracy, **inputs)


@pytest.fixture
def challenger(trained: Trained, tmp_path: Path) -> Challenger:
    return Challenger(trained, tmp_path)


def picture(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGBA", (16, 16), (9, 9, 9, 0)).save(path)  # on the background of the training


def add_image(data: Path) -> None:
    picture(data / "val" / "red" / "more.png")


def test_a_new_training_image_leaves_the_champion_comparable(
    emulator: storage.Client, exported: Path, source: Path, challenger: Challenger
) -> None:
    publish(exported, "squares", open_store("gs://models/exports"), "")
    new = challenger.changed(source, lambda data: picture(data / "train/red/more.png"))
    record, other = new.evaluate(PUBLISHED), Evaluation.read(exported / "metrics.json")
    assert record.dataset_digest != other.dataset_digest
    assert record.split_digest == other.split_digest != ""
    assert not new.again.exists()
    _, reason = new.judge(PUBLISHED, min_improvement=-1)
    gain = (record.correct - other.correct) / 48
    assert f"improvement on the champion {gain:.4f} >= -1" in reason
    assert "re-evaluated" not in reason


def test_a_champion_of_another_split_is_re_evaluated(
    emulator: storage.Client,
    exported: Path,
    source: Path,
    challenger: Challenger,
    blurred_checkpoint: Path,
) -> None:
    """Images are added, changed and removed."""

    def change(data: Path) -> None:
        for number in range(5):
            picture(data / f"val/red/more{number}.png")
            picture(data / f"val/red/00{number}.png")
            (data / f"val/green/00{number}.png").unlink()

    publish(exported, "squares", open_store("gs://models/exports"), "")
    new = challenger.changed(source, change)
    record = new.evaluate(PUBLISHED)
    again = Evaluation.read(new.again / "evaluation.json")
    alone = new.trained._replace(checkpoint=blurred_checkpoint, run_dir=new.folder / "alone")
    expected = alone.evaluate().result
    for field in ("correct", "checkpoint_digest", "step", "samples_digest"):
        assert getattr(again, field) == getattr(expected, field)
    of_bundle, of_checkpoint = (
        prediction_rows((folder / "predictions.csv").read_bytes())
        for folder in (new.again, alone.evaluation.parent)
    )
    numbers = ("confidence", "loss")
    assert converted(of_bundle, numbers, float) == converted(of_checkpoint, numbers, near)
    gain = (record.correct - again.correct) / record.samples
    name = bundle.version(exported)
    for minimum, blessed in ((gain, True), (gain + 0.01, False)):
        rules = {"min_accuracy": 0, "min_improvement": minimum, "max_p_value": 0.9999999}
        result, reason = new.judge(PUBLISHED, **rules)
        assert f"(champion {name} re-evaluated on this split: {again.accuracy:.4f})" in reason
        assert result == blessed
        assert ("McNemar p-value" in reason) == blessed

    # An evaluation without the champion removes that of an earlier one.
    new.evaluate("")
    assert not new.again.exists()
    blessed, reason = new.judge(PUBLISHED, min_accuracy=0)
    assert not blessed
    assert f"{INCOMPARABLE}: give evaluate the same champion" in reason


def test_a_champion_with_more_classes_is_evaluated_by_their_names(
    champion: Path, source: Path, challenger: Challenger, blurred_checkpoint: Path
) -> None:
    new = challenger.changed(source, lambda data: shutil.rmtree(data / "val" / "blue"))
    new = new.untrained("green", "red")
    new.evaluate(champion)
    again = Evaluation.read(new.again / "evaluation.json")
    alone = new.trained._replace(checkpoint=blurred_checkpoint, run_dir=new.folder / "alone")
    assert again.correct == alone.evaluate().result.correct > 0
    assert "re-evaluated on this split" in new.judge(champion)[1]


def test_a_champion_without_one_class(champion: Path, source: Path, challenger: Challenger) -> None:
    new = challenger.changed(source, lambda data: picture(data / "val/violet/a.png"))
    new = new.untrained("blue", "green", "red", "violet")
    record = new.evaluate(champion)
    again = Evaluation.read(new.again / "evaluation.json")
    other = Evaluation.read(champion / "metrics.json")
    assert (record.samples, again.samples, again.correct) == (49, 48, other.correct)
    predictions = record.read_predictions(new.trained.evaluation.parent).values()
    correct = sum(one.correct for one in predictions if one.target != "violet")
    blessed, reason = new.judge(champion)
    assert not blessed
    assert f"improvement on the champion {(correct - other.correct) / 48:.4f} < 0" in reason
    assert "re-evaluated on the 48 samples of its classes" in reason


def test_a_champion_without_any_class(champion: Path, source: Path, challenger: Challenger) -> None:
    def rename(data: Path) -> None:
        for folder in list(data.glob("*/*")):
            folder.rename(folder.with_name(f"{folder.name}_"))

    new = challenger.changed(source, rename).untrained("blue_", "green_", "red_")
    new.evaluate(champion)
    assert not new.again.exists()
    blessed, reason = new.judge(champion)
    assert not blessed
    assert f"{INCOMPARABLE}, and it does not have the class 'blue_'" in reason


def test_a_champion_without_a_bundle_is_not_re_evaluated(
    champion: Path, source: Path, challenger: Challenger, tmp_path: Path
) -> None:
    new = challenger.changed(source, add_image)
    record = tmp_path / "record" / "evaluation.json"
    record.parent.mkdir()
    shutil.copy(champion / "metrics.json", record)
    reasons = (
        (record, f"{INCOMPARABLE}, and {record.parent} has only its evaluation: give its bundle"),
        (tmp_path / "none", f"there is no champion at {tmp_path / 'none'} yet"),
    )
    for place, expected in reasons:
        new.evaluate(place)
        assert not new.again.exists()
        blessed, reason = new.judge(place)
        assert expected in reason
        assert blessed == ("no champion" in expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("altered weights", "is damaged: model.safetensors is not what MANIFEST.sha256 lists"),
        ("other weights", "cannot be evaluated: model.safetensors"),
        ("no weights", "has no model.safetensors to evaluate on this split"),
    ],
)
def test_bad(kind: str, message: str, champion: Path, source: Path, challenger: Challenger) -> None:
    new = challenger.changed(source, add_image)
    file = champion / "model.safetensors"
    match kind:
        case "altered weights":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "other weights":
            save_file({"fc.weight": torch.zeros(3, 3)}, file)
            bundle.seal(champion)
        case "no weights":
            for name in (file.name, "MANIFEST.sha256", "_SUCCESS"):
                (champion / name).unlink()
            bundle.seal(champion)
    with pytest.raises(SystemExit) as caught:
        new.evaluate(champion)
    assert str(caught.value).startswith(f"error: the champion {champion} {message}")
    assert not new.again.exists()


OWN_NETWORK = """
from pathlib import Path
from kfp_ddp.training.model.networks import build as ours

def build(num_classes):
    Path({ran!r}).touch()
    return ours("cifar_resnet8", num_classes)
"""


@pytest.mark.parametrize("as_checkpoint", [False, True])
def test_no_code_of_a_champion_runs_before_its_signature_is_checked(
    champion: Path,
    source: Path,
    challenger: Challenger,
    monkeypatch: pytest.MonkeyPatch,
    as_checkpoint: bool,
) -> None:
    ran = challenger.folder / "ran"
    network, info = weights.read(champion / bundle.WEIGHTS, 1)
    code = pack_text(OWN_NETWORK.format(ran=str(ran)), "net.py")
    info = dataclasses.replace(
        info, model="net.py:build", config={"model_code": code, "blur_pool": True}
    )
    weights.write(network, info, champion / bundle.WEIGHTS)
    version = bundle.seal(champion)[:12]
    models = challenger.folder / "models"
    at = Path(shutil.copytree(champion, models / "model" / version))
    (at.parent / "CHAMPION").write_text(version)
    trained = challenger.changed(source, add_image).trained
    inputs: list[Any] = [challenger.folder, trained.checkpoint, trained.run_dir, trained.dataset]
    if as_checkpoint:
        inputs[1:3] = [at.parent, ""]
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    monkeypatch.setenv("PUB", pem.decode())
    options = {"champion_key": "PUB"}
    monkeypatch.setenv("KFP_DDP_WORK_DIR", str(challenger.folder / "work"))
    evaluate = partial(run_step, *inputs, champion=str(at.parent), run_id="r", options=options)
    with pytest.raises(SystemExit, match=f"{version} is not signed"):
        evaluate()
    assert not ran.exists()
    signature.sign(at, key)
    evaluate()
    assert ran.exists()


def test_evaluate_and_gate_of_the_pipeline_have_the_same_champion_and_secrets() -> None:
    spec = json_format.MessageToDict(train_resnet.pipeline_spec)
    dags = [one["dag"]["tasks"] for one in spec["components"].values() if "dag" in one]
    tasks = next(tasks for tasks in dags if "evaluate" in tasks)
    champions = [tasks[name]["inputs"]["parameters"]["champion"] for name in ("evaluate", "gate")]
    assert champions[0] == champions[1]
    platform = json_format.MessageToDict(train_resnet.platform_spec)["platforms"]["kubernetes"]
    executors = platform["deploymentSpec"]["executors"]
    (secret,) = executors["exec-gate"]["secretAsVolume"]
    assert executors["exec-evaluate"]["secretAsVolume"][0] == secret
