"""Doubtful labels in an evaluation, and the next one without them."""

import csv
import shutil
from pathlib import Path

from PIL import Image

from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.sync import sync
from kfp_ddp.pipelines.form import form_of
from kfp_ddp.training.sides import SIDES
from tests.evaluations import Trained


def table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def saved_again(image: Path, target: Path) -> None:
    """Write an image as JPEG; coarser chroma would change noise."""
    Image.open(image).save(target, quality=95, subsampling=0)


def test_changed_labels_and_copies_are_listed_and_can_be_excluded(
    trained: Trained, tmp_path: Path
) -> None:
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
    left = {
        path.relative_to(version).as_posix()
        for side in SIDES
        for path in version.glob(f"{side}/*/*")
    }
    assert not left & {row["path"] for row in rows}
    assert len(left) == len(list(source.glob("*/*/*"))) - len({row["path"] for row in rows})
    trained._replace(dataset=version).evaluate()
    again = {row["path"] for row in table(folder / "labels_to_check.csv")}
    assert not again & {row["path"] for row in rows}
