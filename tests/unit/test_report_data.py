"""Data of a report: the dataset and the events."""

import json
from pathlib import Path

import pytest
from PIL import Image

from kfp_ddp.evaluation.report_data import dataset_facts
from kfp_ddp.report.data import ReportData
from kfp_ddp.report.events import MAX_POINTS, downsample
from kfp_ddp.training.splits import sides_of


def version(folder: Path, contents: dict[str, int]) -> Path:
    """Write a dataset version; images with equal numbers have equal content."""
    rows = []
    for name, number in sorted(contents.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
        rows.append(json.dumps([name, path.stat().st_size, "t", f"{number:08x}", 1]))
    head = {"format": 1, "source": "gs://b/flowers", "dataset": "flowers", "digest": "d",
            "files": len(rows), "bytes": 5}  # fmt: skip
    (folder / "_MANIFEST.jsonl").write_text("\n".join([json.dumps(head), *rows]) + "\n")
    return folder


def test_the_manifest_has_counts_and_reveals_leaked_images(tmp_path: Path) -> None:
    names = {f"train/{kind}/{at}.png": at + 10 * (kind == "b") for kind in "ab" for at in range(3)}
    names |= {"val/a/x.png": 50, "val/a/y.png": 2, "val/b/z.png": 50, "val/b/v.png": 51}
    folder = version(tmp_path, names)
    index, _ = sides_of(folder, "val", ("a", "b"), {})
    facts = dataset_facts(folder, index, {}, "val")
    assert (facts.name, facts.source, facts.files) == ("flowers", "gs://b/flowers", 10)
    assert (facts.sides["train"], facts.sides["val"]) == (6, 4)
    assert facts.training == {"a": 3, "b": 3}
    assert facts.problems == [
        "1 training images are equal to images of this split, 25.0% of it: "
        "the first is train/a/2.png = val/a/y.png",
        "1 images of this split are equal to another one with another class, one of which is "
        "incorrect: the first is val/b/z.png = val/a/x.png",
    ]


def test_a_clean_dataset_has_no_problems(tmp_path: Path) -> None:
    names = [f"{side}/{kind}/1.png" for side in ("train", "val") for kind in "ab"]
    folder = version(tmp_path, {name: number for number, name in enumerate(names)})
    index, _ = sides_of(folder, "val", ("a", "b"), {})
    assert dataset_facts(folder, index, {}, "val").problems == []
    (folder / "_MANIFEST.jsonl").unlink()
    assert dataset_facts(folder, index, {}, "val").model_dump(exclude_defaults=True) == {}


def test_a_long_training_is_downsampled_to_means() -> None:
    steps = [
        {"event": "step", "time": float(n), "step": n, "epoch": n / 100, "loss": float(n % 2),
         "lr": n / 1e4, "images_per_s": 10.0, "rank_seconds": [1.0] * 64, "skipped_images": n}
        for n in range(1, 10_001)
    ]  # fmt: skip
    others = [{"event": "start", "time": 0.5, "resumed_from_step": 0, "class_weights": [1.0] * 999},
              {"event": "eval", "time": 9000.5, "step": 9000, "accuracy": 0.5}]  # fmt: skip
    events = downsample([others[0], *steps[:5000], *steps[4000:9000], others[1], *steps[9000:]])
    drawn = [e for e in events if e["event"] == "step"]
    assert len(drawn) <= MAX_POINTS
    assert (drawn[-1]["step"], drawn[-1]["epoch"]) == (10_000, 100.0)
    assert all(e["loss"] == pytest.approx(0.5, abs=0.03) for e in drawn)
    assert drawn[-1]["skipped_images"] == 10_000
    assert [e["event"] for e in events if e["event"] != "step"] == ["start", "eval"]
    assert len(ReportData(events=events).model_dump_json()) < 100_000
