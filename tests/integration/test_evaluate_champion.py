"""A champion stays comparable while the dataset grows under it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from google.cloud import storage
from google.protobuf import json_format
from kfp import dsl
from PIL import Image
from safetensors.torch import save_file

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.gate.component import gate
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.evaluation.engine import evaluate as engine
from kfp_ddp.evaluation.results import split_digest
from kfp_ddp.export.publish import publish
from kfp_ddp.models import bundle, weights
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.pipelines.train_resnet import train_resnet
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training import checkpoint as checkpoints
from kfp_ddp.training.model import build

OF_OTHERS = "the champion was evaluated on other samples, so the two are not comparable"


@pytest.fixture(scope="module")
def source(trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bucket held when the champion was trained."""
    folder = tmp_path_factory.mktemp("source") / "squares"
    return Path(shutil.copytree(trained_dataset, folder, ignore=lambda *_: ["_SUCCESS"]))


@pytest.fixture(scope="module")
def exported(
    blurred_checkpoint: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the gate and evaluate need of a champion's bundle; its evaluation is of `source`."""
    run_dir = tmp_path_factory.mktemp("champion")
    version = sync(str(source), run_dir / "data", Options()).path
    engine(blurred_checkpoint, run_dir, version, "val", 64, 0)
    evaluation, folder = run_dir / "evaluation", run_dir / "bundle"
    folder.mkdir()
    weights.write(*checkpoints.load_model(blurred_checkpoint), folder / bundle.WEIGHTS)
    shutil.copy(evaluation / "evaluation.json", folder / "metrics.json")
    shutil.copy(evaluation / "predictions.csv", folder)
    bundle.seal(folder)
    return folder


@pytest.fixture
def champion(exported: Path, tmp_path: Path) -> Path:
    """A copy of the bundle."""
    return Path(shutil.copytree(exported, tmp_path / "champion"))


def today(source: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    """The version that a sync makes after a change of the bucket."""
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    change(changed)
    return sync(str(changed), tmp_path / "data", Options()).path


def evaluated(checkpoint: Path, tmp_path: Path, version: Path, champion: object) -> Path:
    """Folder of the evaluation of a challenger, by the step itself."""
    kinds = {"evaluation_metrics": dsl.Metrics, "confusion_matrix": dsl.ClassificationMetrics}
    kinds |= {"evaluation_report": dsl.HTML, "evaluation_summary": dsl.Markdown}
    artifacts = {name: kind(name=name, uri=str(tmp_path / name)) for name, kind in kinds.items()}
    _, path = evaluate.python_func(
        checkpoint=str(checkpoint),
        run_dir=str(tmp_path / "run"),
        dataset_path=str(version),
        champion=str(champion),
        **artifacts,
    )
    return Path(path).parent


def judged(folder: Path, champion: object, **rules: float) -> tuple[bool, str]:
    """Whether the gate blesses, and why."""
    verdict = dsl.Markdown(name="verdict", uri=str(folder / "verdict.md"))
    record = Evaluation.read(folder / "evaluation.json")
    blessed, _ = gate.python_func(
        accuracy=record.accuracy,
        evaluation=str(folder / "evaluation.json"),
        champion=str(champion),
        gate_verdict=verdict,
        gate_report=dsl.HTML(name="report", uri=str(folder / "page.html")),
        rules=rules,
    )
    return blessed, verdict.metadata["reason"]


def picture(path: Path, colour: tuple[int, int, int] = (9, 9, 9)) -> None:
    """Write one more image."""
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (16, 16), colour).save(path)


def untrained(folder: Path, trained: Path, classes: tuple[str, ...]) -> Path:
    """A checkpoint of a network that was taught other classes."""
    torch.manual_seed(1)
    network = build("cifar_resnet8", len(classes))
    manifest = {**checkpoints.verify(trained).manifest, "classes": list(classes)}
    state = {"model": network.state_dict(), "ema": None}
    return checkpoints.write(folder / "checkpoints", 40, state, manifest)


def test_one_more_training_image_leaves_the_champion_comparable(
    emulator: storage.Client,
    exported: Path,
    source: Path,
    trained_checkpoint: Path,
    tmp_path: Path,
) -> None:
    publish(exported, "squares", open_store("gs://models/exports"), "")
    version = today(source, tmp_path, lambda data: picture(data / "train" / "red" / "more.png"))
    folder = evaluated(trained_checkpoint, tmp_path, version, "gs://models/exports/squares")
    mine = Evaluation.read(folder / "evaluation.json")
    its = Evaluation.read(exported / "metrics.json")
    assert mine.dataset_digest != its.dataset_digest
    assert mine.split_digest == its.split_digest != ""
    assert not (folder / "champion").exists()
    _, reason = judged(folder, "gs://models/exports/squares", min_improvement=-1)
    gain = (mine.correct - its.correct) / 48
    assert f"improvement on the champion {gain:.4f} >= -1" in reason
    assert "re-evaluated" not in reason


@pytest.mark.parametrize("kind", ["added", "changed", "removed"])
def test_where_the_split_changed_the_gate_decides_by_the_champion_evaluated_again(
    kind: str,
    emulator: storage.Client,
    exported: Path,
    source: Path,
    trained_checkpoint: Path,
    blurred_checkpoint: Path,
    tmp_path: Path,
) -> None:

    def change(data: Path) -> None:
        for number in range(9):
            if kind == "removed":
                (data / f"val/red/00{number}.png").unlink()
            else:
                picture(data / f"val/red/{'more' if kind == 'added' else '00'}{number}.png")

    publish(exported, "squares", open_store("gs://models/exports"), "")
    version = today(source, tmp_path, change)
    folder = evaluated(trained_checkpoint, tmp_path, version, "gs://models/exports/squares")
    mine = Evaluation.read(folder / "evaluation.json")
    again = Evaluation.read(folder / "champion" / "evaluation.json")
    expected, _, _, _ = engine(blurred_checkpoint, tmp_path / "expected", version, "val", 64, 0)
    assert again.correct == expected.correct
    assert again.checkpoint_digest == expected.checkpoint_digest
    assert again.step == expected.step
    assert (folder / "champion" / "predictions.csv").read_text() == (
        tmp_path / "expected" / "evaluation" / "predictions.csv"
    ).read_text()

    gain = (mine.correct - again.correct) / mine.samples
    name = bundle.digest(exported)[:12]
    asked = {"champion": "gs://models/exports/squares", "max_p_value": 0.9999999}
    for least, blessed in ((gain, True), (gain + 0.01, False)):
        found, reason = judged(folder, min_improvement=least, **asked)  # type: ignore[arg-type]
        assert f"re-evaluated on this split: {again.accuracy:.4f})" in reason
        assert f"(champion {name} re-evaluated" in reason
        if blessed:
            assert f"improvement on the champion {gain:.4f} >= {gain:g}" in reason
            assert "McNemar p-value" in reason
        assert found == blessed


def test_a_champion_with_classes_that_the_split_lacks_is_evaluated_by_their_names(
    champion: Path,
    source: Path,
    trained_checkpoint: Path,
    blurred_checkpoint: Path,
    tmp_path: Path,
) -> None:
    version = today(source, tmp_path, lambda data: shutil.rmtree(data / "val" / "blue"))
    checkpoint = untrained(tmp_path, trained_checkpoint, ("green", "red"))
    folder = evaluated(checkpoint, tmp_path, version, champion)
    again = Evaluation.read(folder / "champion" / "evaluation.json")
    expected, _, _, _ = engine(blurred_checkpoint, tmp_path / "expected", version, "val", 64, 0)
    assert again.correct == expected.correct > 0
    assert "re-evaluated on this split" in judged(folder, champion)[1]


def test_a_champion_that_lacks_a_class_of_the_split_is_compared_on_the_others(
    champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda data: picture(data / "val" / "violet" / "a.png"))
    classes = ("blue", "green", "red", "violet")
    checkpoint = untrained(tmp_path, trained_checkpoint, classes)
    folder = evaluated(checkpoint, tmp_path, version, champion)
    mine = Evaluation.read(folder / "evaluation.json")
    again = Evaluation.read(folder / "champion" / "evaluation.json")
    its = Evaluation.read(champion / "metrics.json")
    assert (mine.samples, again.samples, again.correct) == (49, 48, its.correct)
    blessed, reason = judged(folder, champion)
    assert not blessed
    right = sum(
        one.correct for one in mine.read_predictions(folder).values() if one.target != "violet"
    )
    assert f"improvement on the champion {(right - its.correct) / 48:.4f} < 0" in reason
    assert "re-evaluated on the 48 samples of its classes" in reason


def test_a_champion_that_knows_no_class_of_the_split_does_not_compare(
    champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    def renamed(data: Path) -> None:
        for name in ("blue", "green", "red"):
            for side in ("train", "val"):
                (data / side / name).rename(data / side / f"{name}_")

    version = today(source, tmp_path, renamed)
    checkpoint = untrained(tmp_path, trained_checkpoint, ("blue_", "green_", "red_"))
    folder = evaluated(checkpoint, tmp_path, version, champion)
    assert not (folder / "champion").exists()
    blessed, reason = judged(folder, champion)
    assert not blessed
    assert f"{OF_OTHERS}, and it does not have the class 'blue_'" in reason


def test_a_bare_evaluation_cannot_be_made_again_and_the_gate_says_so(
    champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda data: picture(data / "val" / "red" / "more.png"))
    alone = tmp_path / "alone" / "evaluation.json"
    alone.parent.mkdir()
    shutil.copy(champion / "metrics.json", alone)
    folder = evaluated(trained_checkpoint, tmp_path, version, alone)
    assert not (folder / "champion").exists()
    blessed, reason = judged(folder, alone)
    assert not blessed
    assert f"{OF_OTHERS}, and {alone.parent} has only its evaluation: give its bundle" in reason


def test_no_champion_yet_is_nothing_to_evaluate(
    source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda _: None)
    none = tmp_path / "none"
    folder = evaluated(trained_checkpoint, tmp_path, version, none)
    assert not (folder / "champion").exists()
    blessed, reason = judged(folder, none)
    assert blessed
    assert f"there is no champion at {none} yet" in reason


def test_an_unchanged_split_needs_nothing_of_the_bundle_but_its_evaluation(
    champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    for path in champion.iterdir():
        if path.name not in ("metrics.json", "predictions.csv"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    version = today(source, tmp_path, lambda _: None)
    folder = evaluated(trained_checkpoint, tmp_path, version, champion)
    assert not (folder / "champion").exists()
    assert "improvement on the champion" in judged(folder, champion)[1]


def test_what_an_earlier_try_found_of_a_champion_does_not_stay(
    champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda data: picture(data / "val" / "red" / "more.png"))
    folder = evaluated(trained_checkpoint, tmp_path, version, champion)
    assert (folder / "champion").exists()
    assert evaluated(trained_checkpoint, tmp_path, version, "") == folder
    assert not (folder / "champion").exists()
    blessed, reason = judged(folder, champion)
    assert not blessed
    assert f"{OF_OTHERS}: give evaluate the same champion" in reason


def spoil(kind: str, folder: Path) -> None:
    """Damage a bundle, or make it one of somebody else."""
    file = folder / "model.safetensors"
    match kind:
        case "altered weights":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "no weights":
            file.unlink()
        case "another evaluation":
            record = json.loads((folder / "metrics.json").read_text())
            (folder / "metrics.json").write_text(json.dumps(record | {"checkpoint_digest": "0"}))
        case "not finished":
            (folder / "_SUCCESS").unlink()
        case "weights of another program":
            save_file({"fc.weight": torch.zeros(3, 3)}, file)
            bundle.seal(folder)
        case "weights never there":
            file.unlink()
            for own in ("MANIFEST.sha256", "_SUCCESS"):
                (folder / own).unlink()
            bundle.seal(folder)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("altered weights", "is damaged: model.safetensors is not what MANIFEST.sha256 lists"),
        ("no weights", "is damaged: model.safetensors is missing"),
        ("another evaluation", "is damaged: metrics.json is not what MANIFEST.sha256 lists"),
        ("not finished", "is damaged: _SUCCESS is not the digest of MANIFEST.sha256"),
        ("weights of another program", "cannot be evaluated on this split: model.safetensors"),
        ("weights never there", "has no model.safetensors to evaluate on this split"),
    ],
)
def test_a_bundle_that_cannot_be_used_is_one_line(
    kind: str, says: str, champion: Path, source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda data: picture(data / "val" / "red" / "more.png"))
    spoil(kind, champion)
    with pytest.raises(SystemExit) as caught:
        evaluated(trained_checkpoint, tmp_path, version, champion)
    said = str(caught.value)
    assert said.startswith(f"error: the champion {champion} ")
    assert says in said
    assert "\n" not in said
    assert not (tmp_path / "run" / "evaluation" / "champion").exists()


def test_digests_of_a_split_tell_images_of_one_name_and_size_apart(
    source: Path, tmp_path: Path
) -> None:
    found = {}
    for colour in ((9, 9, 9), (8, 8, 8)):
        folder, name = tmp_path / str(colour), "red/one.png"
        version = today(source, folder, lambda data: picture(data / "val" / name, colour))  # noqa: B023
        found[split_digest(version, [name], "val")] = (version / "val" / name).stat().st_size
    assert len(found) == 2
    assert len(set(found.values())) == 1


def test_a_digest_of_a_split_needs_every_sample(
    source: Path, trained_checkpoint: Path, tmp_path: Path
) -> None:
    version = today(source, tmp_path, lambda _: None)
    assert engine(trained_checkpoint, tmp_path, version, "val", 64, 0)[0].split_digest
    picture(version / "val" / "red" / "put-there-by-hand.png")
    assert engine(trained_checkpoint, tmp_path, version, "val", 64, 0)[0].split_digest == ""
    (version / "_MANIFEST.jsonl").unlink()
    assert engine(trained_checkpoint, tmp_path, version, "val", 64, 0)[0].split_digest == ""


def test_the_pipeline_gives_evaluate_the_champion_of_the_gate_and_rights_to_read_it() -> None:
    spec = json_format.MessageToDict(train_resnet.pipeline_spec)
    dags = [one["dag"]["tasks"] for one in spec["components"].values() if "dag" in one]
    tasks = next(tasks for tasks in dags if "evaluate" in tasks)
    champions = [tasks[name]["inputs"]["parameters"]["champion"] for name in ("evaluate", "gate")]
    assert champions[0] == champions[1]
    platform = json_format.MessageToDict(train_resnet.platform_spec)["platforms"]["kubernetes"]
    executors = platform["deploymentSpec"]["executors"]
    assert executors["exec-evaluate"]["secretAsVolume"] == executors["exec-gate"]["secretAsVolume"]
