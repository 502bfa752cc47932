"""The samples of an evaluation: its splits, unreadable images, doubtful labels."""

import csv
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.evaluation.engine import log_metrics
from kfp_ddp.models import bundle
from kfp_ddp.models.evaluation import Evaluation
from kfp_ddp.pictures.reading import LayoutRule
from kfp_ddp.pictures.sides import SIDES
from kfp_ddp.pictures.splits import splits_of
from kfp_ddp.pipelines.form import form_of
from kfp_ddp.report.data import ReportData
from kfp_ddp.report.summary import markdown
from kfp_ddp.training.state import checkpoint
from tests import gating
from tests.evaluations import Trained, run_step


def test_val_is_as_trained(trained: Trained, tmp_path: Path) -> None:
    """The images lie in class folders, without splits."""
    data = tmp_path / "data"
    for path in trained.dataset.glob("*/*/*.png"):
        name = data / path.parent.name / f"{path.parents[1].name}-{path.name}"
        name.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, name)
    known = checkpoint.verify(trained.checkpoint).fields["config"]
    config = {**known, "data": str(data), "val_fraction": 0.3}
    split = trained.rewritten(tmp_path / "checkpoints", config=config)._replace(dataset=data)
    record = split.evaluate().result
    expected = {str(Path(p).relative_to(data)) for p in splits_of(data, LayoutRule(0.3)).val.paths}
    assert record.read_predictions(split.evaluation.parent).keys() == expected
    assert (record.samples, record.split) == (len(expected), "val")


def test_the_test_split_is_evaluated_with_val(trained: Trained, tmp_path: Path) -> None:
    data = Path(shutil.copytree(trained.dataset, tmp_path / "data"))
    trained = trained._replace(dataset=data)
    test = trained.run_dir / "evaluation-test"
    without = trained.evaluate()
    assert without.test is None
    assert "Test split" not in without.document
    assert not test.exists()
    with pytest.raises(InputError, match="has no folder test/"):
        trained.evaluate(split="test")

    shutil.copytree(data / "val" / "red", data / "test" / "red")
    both = trained.evaluate()
    assert both.test is not None
    assert (both.result.samples, both.test.samples) == (48, 17)
    assert Evaluation.read(test / "evaluation.json") == both.test
    assert (test / "predictions.csv").is_file()
    assert f"{both.test.correct} of 17 samples" in both.document
    assert "## Test split" in markdown(both.result, both.test)
    logged: dict[str, float] = {}
    log_metrics(both.test, SimpleNamespace(log_metric=logged.__setitem__), "test_")
    assert logged["test_accuracy"] == pytest.approx(both.test.accuracy, abs=1e-6)
    only = trained.evaluate(split="test")
    assert only.test is None
    assert only.result.samples_digest == both.test.samples_digest


BROKEN = ("red/000.png", "green/003.png")


@pytest.fixture
def skipping(trained: Trained, tmp_path: Path) -> Trained:
    """A training with on_bad_image=skip, and two unreadable images in val."""
    dataset = Path(shutil.copytree(trained.dataset, tmp_path / "damaged"))
    for name in BROKEN:
        (dataset / "val" / name).write_bytes(b"no image")
    known = checkpoint.verify(trained.checkpoint).fields["config"]
    config = {**known, "on_bad_image": "skip"}
    return trained.rewritten(tmp_path / "checkpoints", config=config)._replace(dataset=dataset)


def test_unreadable_images_are_skipped_and_counted(
    skipping: Trained, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, record, filled = run_step(tmp_path, *skipping, batch_size=7)
    assert (record.samples, record.skipped) == (46, 2)
    assert sum(one.samples for one in record.classes) == 46
    assert filled["evaluation_metrics"].metadata["skipped"] == 2
    assert "| images left out | 2 |" in (tmp_path / "evaluation_summary").read_text()
    assert "2 unreadable images are left out" in (tmp_path / "evaluation_report").read_text()
    assert f"on_bad_image=skip; the first: {BROKEN[1]}" in capsys.readouterr().out
    predictions = record.read_predictions(folder)
    assert len(predictions) == 46
    assert not predictions.keys() & set(BROKEN)
    with pytest.raises(InputError, match=r"cannot decode .*003\.png"):
        trained._replace(dataset=skipping.dataset).evaluate()

    for name in BROKEN:
        (skipping.dataset / "val" / name).unlink()
    without = skipping.evaluate().result
    assert (record.correct, record.samples_digest) == (without.correct, without.samples_digest)


@pytest.mark.slow
def test_champion_has_the_same_images(skipping: Trained, trained: Trained, tmp_path: Path) -> None:
    old = trained._replace(run_dir=tmp_path / "old")
    old.evaluate()
    champion = old.export()
    result = skipping.evaluate(champion=str(champion)).result
    path = skipping.evaluation
    again = Evaluation.read(path.parent / "champion" / "evaluation.json")
    assert (again.samples, again.skipped, again.correct) == (46, 2, result.correct)
    inputs = {"evaluation": str(path), "max_p_value": 1 - 1e-9}
    blessed, reason = gating.judged(tmp_path, result.accuracy, champion=str(champion), **inputs)
    assert not blessed
    assert "(0 samples won, 0 lost)" in reason
    verdict = json.loads((path.parent / "verdict.json").read_text())
    assert verdict["champion"] == bundle.version(champion)
    shutil.rmtree(path.parent / "champion")
    record = str(old.evaluation)
    _, reason = gating.judged(tmp_path, result.accuracy, champion=record, **inputs)
    assert "evaluated on other samples" in reason


def table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines()))


def saved_again(image: Path, target: Path) -> None:
    """Write an image as JPEG; coarser chroma would change noise."""
    Image.open(image).save(target, quality=95, subsampling=0)


def test_changed_labels_and_copies_can_be_excluded(trained: Trained, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(trained.dataset, source, ignore=shutil.ignore_patterns("_*"))
    trained = trained._replace(dataset=source)
    trained.evaluate()
    folder = trained.evaluation.parent
    assert not [row for row in table(folder / "labels_to_check.csv") if row["other"]]

    sure = [row for row in table(folder / "predictions.csv") if row["target"] == row["predicted"]]
    sure.sort(key=lambda row: -float(row["confidence"]))
    changed = {}
    for row in sure[:3]:
        wrong = "blue" if row["target"] != "blue" else "red"
        changed[f"val/{wrong}/wrong-{row['path'].replace('/', '-')}"] = row["target"]
        (source / "val" / row["path"]).rename(source / list(changed)[-1])
    own, leaked = (source / "val" / row["path"] for row in sure[3:5])
    other = "red" if sure[3]["target"] != "red" else "green"
    saved_again(own, source / "val" / other / "copy.jpg")
    saved_again(leaked, source / "train" / leaked.parent.name / "copy.jpg")
    document = trained.evaluate(worst=30).document
    assert "Labels to check" in document
    rows = table(folder / "labels_to_check.csv")
    labels = [row for row in rows if row["reason"] == "label"]
    assert {row["path"]: row["suggested"] for row in labels[:4]} == {
        **changed, f"val/{other}/copy.jpg": sure[3]["target"]
    }  # fmt: skip
    copies = {(row["path"], row["other"]) for row in rows if row["reason"] == "duplicate"}
    assert copies == {
        (f"val/{other}/copy.jpg", f"val/{sure[3]['path']}"),
        (f"val/{sure[4]['path']}", f"train/{leaked.parent.name}/copy.jpg"),
    }

    arguments = form_of("train_resnet").read(None, [f"exclude=@{folder / 'labels_to_check.csv'}"])
    result = sync(str(source), tmp_path / "data", options_of("", arguments["sync"]))
    version = Path(result.path)
    left = {one.relative_to(version).as_posix() for s in SIDES for one in version.glob(f"{s}/*/*")}
    assert not left & {row["path"] for row in rows}
    assert len(left) == len(list(source.glob("*/*/*"))) - len({row["path"] for row in rows})
    trained._replace(dataset=version).evaluate()
    again = {row["path"] for row in table(folder / "labels_to_check.csv")}
    assert not again & {row["path"] for row in rows}


def test_a_corrected_label_is_no_longer_listed(trained: Trained, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(trained.dataset, source, ignore=shutil.ignore_patterns("_*"))
    known = checkpoint.verify(trained.checkpoint).fields["config"]
    config = {**known, "labels": "labels.csv"}
    trained = trained.rewritten(tmp_path / "checkpoints", config=config)
    folder = trained.evaluation.parent

    def to_check(wrong: dict[str, str]) -> dict[str, str]:
        images = [path.relative_to(source) for path in source.glob("*/*/*.png")]
        labels = {image.as_posix(): image.parts[1] for image in images} | wrong
        lines = [f"{name},{label},{name.split('/')[0]}" for name, label in labels.items()]
        (source / "labels.csv").write_text("\n".join(["path,label,split", *lines]))
        version = sync(str(source), tmp_path / "data", options_of("", {})).path
        trained._replace(dataset=Path(version)).evaluate()
        return {row["path"]: row["suggested"] for row in table(folder / "labels_to_check.csv")}

    before = to_check({})
    rows = [row for row in table(folder / "predictions.csv") if row["target"] == row["predicted"]]
    surest = max(rows, key=lambda row: float(row["confidence"]))
    name = f"val/{surest['target']}/{Path(surest['path']).name}"
    assert name not in before
    wrong = "blue" if surest["target"] != "blue" else "red"
    assert to_check({name: wrong})[name] == surest["target"]
    assert to_check({}) == before


def test_training_images_cannot_be_searched(trained: Trained, tmp_path: Path) -> None:
    source = Path(shutil.copytree(trained.dataset, tmp_path / "source"))
    for image in source.glob("train/*/*"):
        image.write_bytes(b"no image")
    document = trained._replace(dataset=source).evaluate().document
    why = ReportData.read(trained.evaluation.parent).uncompared
    assert why.startswith("none of the ")
    assert why in document


def test_a_model_that_does_not_know_better_contradicts_no_label(
    trained: Trained, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(trained.dataset, tmp_path / "source"))
    classes = sorted((source / "val").iterdir())
    classes[0].rename(tmp_path / "aside")
    for to, of in itertools.pairwise(classes):
        of.rename(to)
    (tmp_path / "aside").rename(classes[-1])
    document = trained._replace(dataset=source).evaluate().document
    folder = trained.evaluation.parent
    least = ReportData.read(folder).least_score
    assert least is not None
    assert least > 0.5
    rows = [row for row in table(folder / "labels_to_check.csv") if row["reason"] == "label"]
    assert all(float(row["score"]) >= round(least, 4) for row in rows)
    assert (
        len(rows)
        < len(
            [row for row in table(folder / "predictions.csv") if row["target"] != row["predicted"]]
        )
        / 2
    )
    assert f"a score below {least:.2f} is left out" in document
