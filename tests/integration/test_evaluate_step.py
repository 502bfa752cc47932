import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kfp import dsl
from PIL import Image

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.evaluation.engine import evaluate as engine
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.training import checkpoint as checkpoints
from kfp_ddp.training.checkpoint import load_model
from kfp_ddp.training.data import evaluation_batches
from kfp_ddp.training.model import build, normalise
from kfp_ddp.training.splits import scan


def artifacts(folder: Path) -> dict[str, Any]:
    kinds = {
        "evaluation_metrics": dsl.Metrics,
        "confusion_matrix": dsl.ClassificationMetrics,
        "evaluation_report": dsl.HTML,
        "evaluation_summary": dsl.Markdown,
    }
    return {name: kind(name=name, uri=str(folder / name)) for name, kind in kinds.items()}


def predictions(run_dir: Path) -> list[dict[str, str]]:
    text = (run_dir / "evaluation" / "predictions.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def test_the_step_fills_every_artifact(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    filled = artifacts(tmp_path)
    accuracy, path = evaluate.python_func(
        checkpoint=str(trained_checkpoint),
        run_dir=str(trained_run),
        dataset_path=str(trained_dataset),
        batch_size=7,
        **filled,
    )
    record = Evaluation.read(Path(path))
    assert Path(path) == trained_run / "evaluation" / "evaluation.json"

    model, info = load_model(trained_checkpoint)
    index = scan(trained_dataset / "val", info.classes)
    images, targets, _ = next(evaluation_batches(index, info.image_size, len(index), 0, 1))
    with torch.inference_mode():
        hits = int((model(normalise(images)).argmax(1) == targets).sum())
    assert 0 < hits < record.samples == len(index) == 48
    assert (record.correct, record.accuracy, accuracy) == (hits, hits / 48, hits / 48)
    assert record.accuracy_low < record.accuracy < record.accuracy_high
    assert [(c.name, c.samples) for c in record.classes] == [
        ("blue", 15), ("green", 16), ("red", 17)
    ]  # fmt: skip
    assert record.dataset_digest == "ab" * 32
    assert record.checkpoint_digest == checkpoints.verify(trained_checkpoint).digest

    assert filled["evaluation_metrics"].metadata["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    matrix = filled["confusion_matrix"].metadata["confusionMatrix"]
    assert sum(cell for row in matrix["rows"] for cell in row["row"]) == 48
    assert filled["confusion_matrix"].metadata["confidenceMetrics"]
    assert (
        f"{hits / 48:.2%} of 48 samples correct"
        in Path(filled["evaluation_summary"].path).read_text()
    )

    rows = predictions(trained_run)
    assert sorted({row["path"] for row in rows}) == sorted(
        Path(p).relative_to(trained_dataset / "val").as_posix() for p in index.paths
    )
    assert sum(row["target"] == row["predicted"] for row in rows) == hits

    report = Path(filled["evaluation_report"].path).read_text()
    assert report == (trained_run / "evaluation" / "report.html").read_text()
    assert report.count("data:image/webp;base64,") == min(24 + 8, 48 - hits)
    assert "Loss by epoch" in report
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", report)


def test_a_split_of_one_class_and_another_name_is_evaluated_apart(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "data"
    shutil.copytree(trained_dataset / "val" / "red", dataset / "drift" / "red")
    record, _, document, _ = engine(trained_checkpoint, trained_run, dataset, "drift", 64, 0)
    assert (record.samples, record.dataset_digest) == (17, "")
    assert (trained_run / "evaluation-drift" / "evaluation.json").is_file()
    assert not re.search(r">[^<]*\b(nan|inf)\b", document)


def test_the_order_of_a_prediction_is_the_path_not_the_batch(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path
) -> None:
    engine(trained_checkpoint, trained_run, trained_dataset, "val", 1, 4)
    one = (trained_run / "evaluation" / "predictions.csv").read_text()
    engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 4)
    many = (trained_run / "evaluation" / "predictions.csv").read_text()
    columns = [[line.rsplit(",", 2)[0] for line in text.splitlines()] for text in (one, many)]
    assert columns[0] == columns[1]


def broken(kind: str, dataset: Path, checkpoint: Path) -> dict[str, Any]:
    """Arguments of an evaluation that cannot be done, spoilt in copies of the two folders."""
    given: dict[str, Any] = {"split": "val", "batch_size": 64, "worst": 8}
    match kind:
        case "no checkpoint":
            shutil.rmtree(checkpoint)
        case "torn checkpoint":
            (checkpoint / "state.pt").write_bytes(b"torn")
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
        case "broken image":
            (dataset / "val" / "red" / "000.png").write_bytes(b"no image")
        case "split outside":
            given["split"] = "../train"
        case "batch size":
            given["batch_size"] = 0
        case "worst":
            given["worst"] = -1
    return given


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("no checkpoint", "there is no checkpoint"),
        ("torn checkpoint", "state.pt is truncated"),
        ("altered checkpoint", "state.pt was altered"),
        ("no split", "has no folder val/"),
        ("empty split", "has no images"),
        ("unknown class", "'violet'"),
        ("broken image", "000.png"),
        ("split outside", "split is '../train'"),
        ("batch size", "batch_size is 0"),
        ("worst", "worst is -1"),
    ],
)
def test_bad_input_is_one_line(
    kind: str,
    says: str,
    trained_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
) -> None:
    dataset, checkpoint = tmp_path / "data", tmp_path / "step-00000040"
    shutil.copytree(trained_dataset, dataset)
    shutil.copytree(trained_checkpoint, checkpoint)
    given = broken(kind, dataset, checkpoint)
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        engine(checkpoint, trained_run, dataset, **given)
    assert "\n" not in str(caught.value)
    assert not (trained_run / "evaluation" / "evaluation.json").exists()


def test_the_component_ends_with_the_line_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: there is no checkpoint"):
        evaluate.python_func(
            checkpoint=str(tmp_path / "none"),
            run_dir=str(tmp_path),
            dataset_path=str(tmp_path),
            **artifacts(tmp_path),
        )


def test_a_model_that_diverged_is_named_as_such(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    manifest = checkpoints.verify(trained_checkpoint).manifest
    network = build("cifar_resnet8", 3)
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    keep = {k: v for k, v in manifest.items() if k not in ("files", "step")}
    diverged = checkpoints.write(tmp_path, 41, {"model": network.state_dict(), "ema": None}, keep)
    with pytest.raises(InputError, match="training diverged"):
        engine(diverged, trained_run, trained_dataset, "val", 64, 8)


def test_a_run_folder_without_rights_is_one_line(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="cannot be written to"):
        engine(trained_checkpoint, blocked, trained_dataset, "val", 64, 8)


def test_a_folder_that_was_planted_is_not_written_through(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "evaluation.json").write_text("mine")
    (trained_run / "evaluation").symlink_to(outside)
    with pytest.raises(StorageError, match="cannot be written to"):
        engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 8)
    (trained_run / "evaluation").unlink()
    (trained_run / "evaluation").mkdir()
    (trained_run / "evaluation" / "champion").symlink_to(outside)
    (trained_run / "evaluation" / "report.html").symlink_to(outside / "evaluation.json")
    engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 8)
    assert [path.name for path in outside.iterdir()] == ["evaluation.json"]
    assert (outside / "evaluation.json").read_text() == "mine"


def test_the_worst_mistakes_come_by_loss_and_then_the_surest_of_the_others(
    trained_checkpoint: Path, trained_dataset: Path, trained_run: Path
) -> None:
    _, _, document, _ = engine(trained_checkpoint, trained_run, trained_dataset, "val", 64, 5)
    wrong = [row for row in predictions(trained_run) if row["target"] != row["predicted"]]
    worst = sorted(wrong, key=lambda row: -float(row["loss"]))[:5]
    shown = re.findall(r'class="tiny".*?alt="([^"]*)"', document)
    assert shown[:5] == [row["path"] for row in worst]
    others = [row for row in wrong if row not in worst]
    surest = max(others, key=lambda row: float(row["confidence"]))
    assert shown[5:] == [surest["path"]]


def test_an_odd_image_still_has_a_thumbnail(
    trained_checkpoint: Path, trained_run: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "data"
    for name in ("blue", "green", "red"):
        (dataset / "val" / name).mkdir(parents=True)
    Image.new("L", (300, 90), 40).save(dataset / "val" / "blue" / "gray.png")
    Image.new("CMYK", (40, 80)).save(dataset / "val" / "green" / "cmyk.jpg")
    Image.new("RGBA", (16, 16), (0, 255, 0, 9)).save(dataset / "val" / "red" / "alpha.png")
    record, _, document, _ = engine(trained_checkpoint, trained_run, dataset, "val", 64, 8)
    assert record.samples == 3
    assert document.count("data:image/webp;base64,") == 3 - record.correct
