"""The evaluate step in one process."""

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from kfp_ddp.components.evaluate.component import evaluate as component
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.training import checkpoint as checkpoints
from kfp_ddp.training.checkpoint import load_model
from kfp_ddp.training.data import evaluation_batches
from kfp_ddp.training.model import build, normalise
from kfp_ddp.training.splits import scan
from tests.evaluations import artifacts, evaluate, run_step


def predictions(run_dir: Path) -> list[dict[str, str]]:
    text = (run_dir / "evaluation" / "predictions.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def test_the_step_fills_every_artifact(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    folder, record, filled = run_step(
        tmp_path, trained_checkpoint, trained_run, trained_dataset, batch_size=7
    )
    assert folder == trained_run / "evaluation"
    model, info = load_model(trained_checkpoint)
    index = scan(trained_dataset / "val", info.classes)
    images, targets, _ = next(evaluation_batches(index, info.image_size, len(index)))
    with torch.inference_mode():
        hits = int((model(normalise(images)).argmax(1) == targets).sum())
    assert 0 < hits < record.samples == len(index) == 48
    assert (record.correct, record.accuracy) == (hits, hits / 48)
    assert record.accuracy_low < record.accuracy < record.accuracy_high
    assert [(c.name, c.samples) for c in record.classes] == [
        ("blue", 15), ("green", 16), ("red", 17)
    ]  # fmt: skip
    assert record.dataset_digest == "ab" * 32
    assert record.checkpoint_digest == checkpoints.verify(trained_checkpoint).digest

    accuracy = filled["evaluation_metrics"].metadata["accuracy"]
    assert accuracy == pytest.approx(record.accuracy, abs=1e-6)
    matrix = filled["confusion_matrix"].metadata["confusionMatrix"]
    assert sum(cell for row in matrix["rows"] for cell in row["row"]) == 48
    assert filled["confusion_matrix"].metadata["confidenceMetrics"]
    summary = (tmp_path / "evaluation_summary").read_text()
    assert f"{hits / 48:.2%} of 48 samples correct" in summary

    rows = predictions(trained_run)
    assert sorted({row["path"] for row in rows}) == sorted(
        Path(p).relative_to(trained_dataset / "val").as_posix() for p in index.paths
    )
    assert sum(row["target"] == row["predicted"] for row in rows) == hits

    report = (tmp_path / "evaluation_report").read_text()
    assert report == (folder / "report.html").read_text()
    mistakes, _, doubtful = report.partition("Labels to check")
    assert mistakes.count("data:image/webp;base64,") == min(24 + 8, 48 - hits)
    assert 0 < doubtful.count("data:image/webp;base64,") <= 12
    assert "Loss by epoch" in report
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", report)


def test_a_split_of_one_class_and_of_another_name(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "data"
    shutil.copytree(trained_dataset / "val" / "red", dataset / "drift" / "red")
    record, _, document, _ = evaluate(trained_checkpoint, trained_run, dataset, split="drift")
    assert (record.samples, record.dataset_digest) == (17, "")
    assert (trained_run / "evaluation-drift" / "evaluation.json").is_file()
    assert not re.search(r">[^<]*\b(nan|inf)\b", document)


def damage(kind: str, dataset: Path, checkpoint: Path) -> None:
    match kind:
        case "altered checkpoint":
            state = checkpoint / "state.pt"
            content = bytearray(state.read_bytes())
            content[len(content) // 2] ^= 1
            state.write_bytes(content)
        case "no split":
            shutil.rmtree(dataset / "val")
        case "empty split":
            for image in dataset.glob("val/*/*"):
                image.unlink()
        case "unknown class":
            shutil.copytree(dataset / "val" / "red", dataset / "val" / "violet")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("altered checkpoint", "state.pt was altered"),
        ("no split", "has no folder val/"),
        ("empty split", "has no images"),
        ("unknown class", "'violet'"),
    ],
)
def test_invalid_input_fails_with_one_line_error(
    kind: str,
    message: str,
    trained_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
) -> None:
    dataset, checkpoint = tmp_path / "data", tmp_path / "step-00000040"
    shutil.copytree(trained_dataset, dataset)
    shutil.copytree(trained_checkpoint, checkpoint)
    damage(kind, dataset, checkpoint)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        evaluate(checkpoint, trained_run, dataset)
    assert "\n" not in str(caught.value)
    assert not (trained_run / "evaluation" / "evaluation.json").exists()


def test_the_component_fails_with_one_line_error(tmp_path: Path) -> None:
    folders = dict.fromkeys(("run_dir", "dataset_path"), str(tmp_path))
    with pytest.raises(SystemExit, match="error: there is no checkpoint"):
        component.python_func(checkpoint=f"{tmp_path}/none", **folders, **artifacts(tmp_path))


def changed_weights(kind: str, trained: Path, folder: Path) -> Path:
    """Write a checkpoint of other weights, with a valid digest."""
    manifest = checkpoints.verify(trained).manifest
    state = checkpoints.verify(trained).state()
    network = state["ema"] or state["model"]
    match kind:
        case "another network":
            network = build("cifar_resnet14", 3).state_dict()
        case "NaN":
            network["fc.weight"].fill_(torch.nan)
        case "large":
            network["fc.weight"].fill_(3e38)
        case prefix:
            network = {f"{prefix}{name}": value for name, value in network.items()}
    fields = {k: v for k, v in manifest.items() if k not in ("files", "step")}
    return checkpoints.write(folder, 41, {"model": network, "ema": None}, fields)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_weights_of_a_wrapped_network_are_accepted(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path, prefix: str
) -> None:
    wrapped = changed_weights(prefix, trained_checkpoint, tmp_path)
    results = [
        evaluate(checkpoint, trained_run, trained_dataset).result
        for checkpoint in (wrapped, trained_checkpoint)
    ]
    assert results[0].confusion == results[1].confusion


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("another network", "do not fit a cifar_resnet8"),
        ("NaN", "fc.weight is NaN or infinite: training diverged"),
        ("large", "returns NaN or infinity for .*: training diverged"),
    ],
)
def test_invalid_weights_fail_with_one_line_error(
    trained_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
    kind: str,
    message: str,
) -> None:
    checkpoint = changed_weights(kind, trained_checkpoint, tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        evaluate(checkpoint, trained_run, trained_dataset)
    assert "\n" not in str(caught.value)


def test_no_planted_file_or_link_is_followed(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "evaluation.json").write_text("private")
    (trained_run / "evaluation").symlink_to(outside)
    for run_dir in (trained_run, outside / "evaluation.json"):
        with pytest.raises(StorageError, match="cannot be written to"):
            evaluate(trained_checkpoint, run_dir, trained_dataset)
    (trained_run / "evaluation").unlink()
    (trained_run / "evaluation").mkdir()
    (trained_run / "evaluation" / "champion").symlink_to(outside)
    (trained_run / "evaluation" / "report.html").symlink_to(outside / "evaluation.json")
    evaluate(trained_checkpoint, trained_run, trained_dataset)
    assert [path.name for path in outside.iterdir()] == ["evaluation.json"]
    assert (outside / "evaluation.json").read_text() == "private"


def test_mistakes_are_ordered_by_loss_and_others_by_confidence(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path
) -> None:
    document = evaluate(trained_checkpoint, trained_run, trained_dataset, worst=5).document
    wrong = [row for row in predictions(trained_run) if row["target"] != row["predicted"]]
    worst = sorted(wrong, key=lambda row: -float(row["loss"]))[:5]
    mistakes = document.partition("Labels to check")[0]
    shown = re.findall(r'class="tiny".*?alt="([^"]*)"', mistakes)
    assert shown[:5] == [row["path"] for row in worst]
    others = [row for row in wrong if row not in worst]
    confident = max(others, key=lambda row: float(row["confidence"]))
    assert shown[5:] == [confident["path"]]


def test_images_of_any_mode_have_a_thumbnail(
    trained_checkpoint: Path, trained_run: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "data"
    for name in ("blue", "green", "red"):
        (dataset / "val" / name).mkdir(parents=True)
    Image.new("L", (300, 90), 40).save(dataset / "val" / "blue" / "gray.png")
    Image.new("CMYK", (40, 80)).save(dataset / "val" / "green" / "cmyk.jpg")
    Image.new("RGBA", (16, 16), (0, 255, 0, 9)).save(dataset / "val" / "red" / "alpha.png")
    record, _, document, _ = evaluate(trained_checkpoint, trained_run, dataset, worst=8)
    assert record.samples == 3
    mistakes = document.partition("Labels to check")[0]
    assert mistakes.count("data:image/webp;base64,") == 3 - record.correct
