"""The evaluate step in one process and on several ranks."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.evaluation.comparison import mcnemar
from kfp_ddp.models import bundle, weights
from kfp_ddp.models.evaluation import FILE, PREDICTIONS, Evaluation
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training.data.loader import evaluation_batches
from kfp_ddp.training.model.networks import build, normalise
from kfp_ddp.training.state import checkpoint as checkpoints
from kfp_ddp.training.state.checkpoint import load_model
from tests.evaluations import State, Trained, run_step

OF_A_RUN = ("seconds", "world_size", "hardware", "written")
"""Fields of the record that differ between evaluations of one checkpoint."""
STEP = """
import json, sys
from pathlib import Path
from tests.evaluations import Trained, run_step
inputs = json.loads(sys.argv[1])
folders = [Path(inputs.pop(name)) for name in ("out", *Trained._fields)]
folder, record, filled = run_step(*folders, **inputs)
print("OUTPUTS", json.dumps([record.accuracy, str(folder), filled["confusion_matrix"].metadata]))
"""


def predictions(run_dir: Path) -> list[dict[str, str]]:
    text = (run_dir / "evaluation" / "predictions.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def test_the_step_fills_every_artifact(trained: Trained, tmp_path: Path) -> None:
    folder, record, filled = run_step(tmp_path, *trained, batch_size=7)
    assert folder == trained.run_dir / "evaluation"
    model, info = load_model(str(trained.checkpoint))
    index = scan(trained.dataset / "val", info.classes)
    images, targets, *_ = next(evaluation_batches(index, info.image_size, len(index)))
    with torch.inference_mode():
        hits = int((model(normalise(images)).argmax(1) == torch.tensor(targets)).sum())
    assert 0 < hits < record.samples == len(index) == 48
    assert (record.correct, record.accuracy) == (hits, hits / 48)
    assert record.accuracy_low < record.accuracy < record.accuracy_high
    assert [(c.name, c.samples) for c in record.classes] == [
        ("blue", 15), ("green", 16), ("red", 17)
    ]  # fmt: skip
    assert record.dataset_digest == "ab" * 32
    assert record.checkpoint_digest == checkpoints.verify(trained.checkpoint).digest

    assert Evaluation.read(Path(filled["evaluation_metrics"].path)) == record
    accuracy = filled["evaluation_metrics"].metadata["accuracy"]
    assert accuracy == pytest.approx(record.accuracy, abs=1e-6)
    matrix = filled["confusion_matrix"].metadata["confusionMatrix"]
    assert sum(cell for row in matrix["rows"] for cell in row["row"]) == 48
    assert filled["confusion_matrix"].metadata["confidenceMetrics"]
    summary = (tmp_path / "evaluation_summary").read_text()
    assert f"{hits / 48:.2%} of 48 samples correct" in summary

    rows = predictions(trained.run_dir)
    assert sorted({row["path"] for row in rows}) == sorted(
        Path(p).relative_to(trained.dataset / "val").as_posix() for p in index.paths
    )
    assert sum(row["target"] == row["predicted"] for row in rows) == hits

    report = (tmp_path / "evaluation_report").read_text()
    assert report == (folder / "report.html").read_text()
    mistakes, _, doubtful = report.partition("Labels to check")
    assert mistakes.count("data:image/webp;base64,") == min(24 + 8, 48 - hits)
    assert 0 < doubtful.count("data:image/webp;base64,") <= 12
    assert "Loss by epoch" in report
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", report)


def test_a_split_of_one_class_and_of_another_name(trained: Trained, tmp_path: Path) -> None:
    drifted = trained._replace(dataset=tmp_path / "data")
    shutil.copytree(trained.dataset / "val" / "red", drifted.dataset / "drift" / "red")
    record, _, document, _ = drifted.evaluate(split="drift")
    assert (record.samples, record.dataset_digest) == (17, "")
    assert (trained.run_dir / "evaluation-drift" / "evaluation.json").is_file()
    assert not re.search(r">[^<]*\b(nan|inf)\b", document)


def altered(given: Trained) -> None:
    state = given.checkpoint / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)


def emptied(given: Trained) -> None:
    for image in given.dataset.glob("val/*/*"):
        image.unlink()


def filled(value: float) -> Callable[[Trained], Trained]:
    def change(state: State) -> State:
        return {**state, "fc.weight": torch.full_like(state["fc.weight"], value)}

    return lambda given: given.rewritten(given.checkpoint.parent, change)


def another_network(given: Trained) -> Trained:
    other = build("cifar_resnet14", 3).state_dict()
    return given.rewritten(given.checkpoint.parent, lambda _: other)


def with_unknown_class(given: Trained) -> None:
    shutil.copytree(given.dataset / "val" / "red", given.dataset / "val" / "violet")


@pytest.fixture
def own(trained: Trained, tmp_path: Path) -> Trained:
    """A copy of all that a test may change."""
    checkpoint = Path(shutil.copytree(trained.checkpoint, tmp_path / "step-00000040"))
    dataset = Path(shutil.copytree(trained.dataset, tmp_path / "data"))
    return trained._replace(checkpoint=checkpoint, dataset=dataset)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (altered, r"state\.pt was altered"),
        (lambda given: shutil.rmtree(given.dataset / "val"), "has no folder val/"),
        (emptied, "has no images"),
        (with_unknown_class, "'violet'"),
        (another_network, "do not fit a cifar_resnet8"),
        (filled(torch.nan), r"fc\.weight is NaN or infinite: training diverged"),
        (filled(3e38), "returns NaN or infinity for .*: training diverged"),
    ],
)
def test_invalid_input(damage: Callable[[Trained], object], message: str, own: Trained) -> None:
    damage(own)
    with pytest.raises(InputError, match=message):
        own.evaluate()
    assert not own.evaluation.exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_weights_of_a_wrapped_network(trained: Trained, tmp_path: Path, prefix: str) -> None:
    expected = trained.evaluate().result.confusion
    wrapped = trained.rewritten(
        tmp_path, lambda state: {prefix + name: value for name, value in state.items()}
    )
    assert wrapped.evaluate().result.confusion == expected


def test_no_planted_file_or_link_is_followed(trained: Trained, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", trained.run_dir / "evaluation"
    outside.mkdir()
    (outside / "evaluation.json").write_text("private")
    folder.symlink_to(outside)
    for run_dir in (trained.run_dir, outside / "evaluation.json"):
        with pytest.raises(StorageError, match="cannot write to"):
            trained._replace(run_dir=run_dir).evaluate()
    folder.unlink()
    folder.mkdir()
    (folder / "champion").symlink_to(outside)
    (folder / "report.html").symlink_to(outside / "evaluation.json")
    trained.evaluate()
    assert [path.name for path in outside.iterdir()] == ["evaluation.json"]
    assert (outside / "evaluation.json").read_text() == "private"


def test_mistakes_are_ordered_by_loss_and_others_by_confidence(trained: Trained) -> None:
    document = trained.evaluate(worst=5).document
    wrong = [row for row in predictions(trained.run_dir) if row["target"] != row["predicted"]]
    worst = sorted(wrong, key=lambda row: -float(row["loss"]))[:5]
    mistakes = document.partition("Labels to check")[0]
    shown = re.findall(r'class="tiny".*?alt="([^"]*)"', mistakes)
    assert shown[:5] == [row["path"] for row in worst]
    others = [row for row in wrong if row not in worst]
    confident = max(others, key=lambda row: float(row["confidence"]))
    assert shown[5:] == [confident["path"]]


def test_images_of_any_mode_have_a_thumbnail(trained: Trained, tmp_path: Path) -> None:
    dataset = tmp_path / "data"
    for name in ("blue", "green", "red"):
        (dataset / "val" / name).mkdir(parents=True)
    Image.new("L", (300, 90), 40).save(dataset / "val" / "blue" / "gray.png")
    Image.new("CMYK", (40, 80)).save(dataset / "val" / "green" / "cmyk.jpg")
    Image.new("RGBA", (16, 16), (0, 255, 0, 9)).save(dataset / "val" / "red" / "alpha.png")
    record, _, document, _ = trained._replace(dataset=dataset).evaluate(worst=8)
    assert record.samples == 3
    mistakes = document.partition("Labels to check")[0]
    assert mistakes.count("data:image/webp;base64,") == 3 - record.correct


def test_slices_intervals_and_gain_are_in_the_record(trained: Trained, tmp_path: Path) -> None:
    images = sorted((trained.dataset / "val").glob("*/*"))
    names = [f"{path.parent.name}/{path.name}" for path in images]
    light = {name: "day" if at % 3 else "night" for at, name in enumerate(names)}
    rows = [f"val/{name},{value}" for name, value in light.items()]
    (tmp_path / "tags.csv").write_text("\n".join(["path,light", *rows]) + "\n")

    options = {"tags": str(tmp_path / "tags.csv"), "resamples": 50}
    first = "/dev/gone/models/resnet"  # on a volume, as /dev is mounted everywhere
    record = trained.evaluate(options=options, champion=first).result
    folder = trained.evaluation.parent
    correct = {path: one.correct for path, one in record.read_predictions(folder).items()}
    samples = Counter(light.values())
    hits = Counter(value for name, value in light.items() if correct[name])
    expected = [("light", value, samples[value], hits[value]) for value in ("day", "night")]
    assert [(s.name, s.value, s.samples, s.correct) for s in record.slices] == expected

    assert record.balanced_accuracy == pytest.approx(record.macro_recall)
    assert set(record.intervals) == {"balanced_accuracy", "macro_f1", "calibration_error"}
    for name, interval in record.intervals.items():
        assert interval.low <= getattr(record, name) <= interval.high
    assert record.macro_roc_auc is not None
    assert record.compared is None

    # A champion with two more correct samples, and one less.
    champion = tmp_path / "champion"
    champion.mkdir()
    better = [path for path, hit in sorted(correct.items()) if not hit][:2]
    worse = [path for path, hit in sorted(correct.items()) if hit][:1]
    swapped = {**correct, **dict.fromkeys(better, True), **dict.fromkeys(worse, False)}
    lines = [f"{path},a,{'a' if hit else 'b'},1,0" for path, hit in swapped.items()]
    header = "path,target,predicted,confidence,loss"
    (champion / PREDICTIONS).write_text("\n".join([header, *lines]) + "\n")
    counts = {"correct": record.correct + 1, "accuracy": (record.correct + 1) / 48}
    (champion / FILE).write_text(record.model_copy(update=counts).model_dump_json())
    again = trained.evaluate(champion=str(champion)).result
    assert not (folder / "champion").exists(), "it is not evaluated again"
    assert again.slices == []
    compared = Evaluation.read(folder / FILE).compared
    assert compared is not None
    assert again.compared == compared
    assert (compared.won, compared.lost, compared.p_value) == (1, 2, mcnemar(1, 2))
    assert compared.gain == pytest.approx(-1 / 48)
    assert compared.low is not None
    assert compared.high is not None
    assert compared.low < compared.gain < compared.high
    assert sum(one.won - one.lost for one in compared.classes) == -1


def test_an_invalid_table_of_tags_fails_before_the_evaluation(trained: Trained) -> None:
    with pytest.raises(InputError, match=r"tags is none\.csv, but this file is not found"):
        trained.evaluate(options={"tags": "none.csv"})
    assert not trained.evaluation.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_equal_one(trained: Trained, blurred_checkpoint: Path, tmp_path: Path) -> None:
    """Also those of the test split and of a champion that was evaluated on one image less."""
    before = trained._replace(checkpoint=blurred_checkpoint, run_dir=tmp_path / "before")
    before.evaluate()
    champion = tmp_path / "champion"
    champion.mkdir()
    shutil.copy(before.evaluation, champion / "metrics.json")
    shutil.copy(before.evaluation.with_name("predictions.csv"), champion)
    weights.write(*checkpoints.load_model(blurred_checkpoint), champion / "model.safetensors")
    bundle.seal(champion)
    dataset = Path(shutil.copytree(trained.dataset, tmp_path / "data"))
    shutil.copy(dataset / "val" / "red" / "000.png", dataset / "val" / "red" / "more.png")
    shutil.copytree(dataset / "val", dataset / "test")
    given = trained._replace(dataset=dataset)
    more = {"batch_size": 7, "champion": str(champion)}
    inputs = {**given._asdict(), **more, "out": tmp_path, "job": {"nproc_per_node": 2}}
    step = subprocess.run(
        [sys.executable, "-u", "-c", STEP, json.dumps(inputs, default=str)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    output = step.stdout
    assert step.returncode == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 on" in output
    folder = given.evaluation.parent
    record = Evaluation.read(given.evaluation)
    accuracy, path, charts = json.loads(output.split("OUTPUTS ")[1].splitlines()[0])
    assert (accuracy, path) == (record.accuracy, str(folder))
    assert (record.world_size, record.samples) == (2, 49)
    assert charts["confidenceMetrics"]
    assert not (folder / "process.json").exists()
    by_ranks = written(given.run_dir)
    assert json.loads(by_ranks["evaluation/champion/evaluation.json"])["samples"] == 49
    given.evaluate(**more)
    assert written(given.run_dir) == by_ranks


def written(run_dir: Path) -> dict[str, str]:
    """Return the tables and records of all evaluations, without what differs between two."""
    files = {}
    for folder in ("evaluation", "evaluation-test", "evaluation/champion"):
        record = json.loads((run_dir / folder / "evaluation.json").read_text())
        remaining = {name: value for name, value in record.items() if name not in OF_A_RUN}
        files[f"{folder}/evaluation.json"] = json.dumps(remaining)
        files[f"{folder}/predictions.csv"] = (run_dir / folder / "predictions.csv").read_text()
    files["labels"] = (run_dir / "evaluation" / "labels_to_check.csv").read_text()
    return files
