"""Charts, matrices, the dataset and the time of the training in a report."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kfp_ddp import report
from kfp_ddp.evaluation.report_data import dataset_facts
from kfp_ddp.pictures.splits import sides_of
from kfp_ddp.report.charts import Series, confusion_matrix, line_chart
from kfp_ddp.report.data import ReportData
from kfp_ddp.report.events import MAX_POINTS, downsample, resumed_epochs
from kfp_ddp.report.training import time_section, training_curves
from kfp_ddp.training.spec.metrics import read_events
from kfp_ddp.training.spec.time_spent import PHASES
from tests import reports
from tests.unit.report.test_report import text

NS = "{http://www.w3.org/2000/svg}"


def parse(html: str) -> ET.Element:
    return ET.fromstring(str(html).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def test_a_curve_is_inside_its_axes_and_descends_with_the_loss() -> None:
    points = [(float(x), 100.0 / (1 + x)) for x in range(2000)]
    root = parse(line_chart("Loss", [Series("training", points)]))
    curve = next(e for e in root.iter(f"{NS}path") if e.get("class") == "curve")
    path = re.findall(r"[\d.]+ [\d.]+", curve.attrib["d"])
    drawn = [tuple(map(float, pair.split())) for pair in path]
    assert len(drawn) <= MAX_POINTS
    assert all(0 <= x <= 640 and 0 <= y <= 320 for x, y in drawn)
    heights = [y for _, y in drawn]
    assert heights == sorted(heights)


@pytest.mark.parametrize(
    "points",
    [[], [(0.0, float("nan"))], [(1.0, 3.0)], [(1.0, 3.0), (2.0, 3.0)], [(0.0, float("inf"))]],
)
def test_empty_constant_and_infinite_series_are_drawn(points: list[tuple[float, float]]) -> None:
    svg = line_chart("Loss", [Series("training", points)])
    parse(svg)
    assert "nan" not in svg
    assert "inf" not in svg


def test_the_matrix_has_counts_with_tooltips() -> None:
    root = parse(confusion_matrix(["cat", "dog"], [[30, 2], [5, 63]], [4, 0]))
    svg = next(root.iter(f"{NS}svg"))
    assert svg.get("aria-label") == "Confusion matrix of 2 classes: 93 of 104 on the diagonal"
    titles = {e.text for e in root.iter(f"{NS}title")}
    assert {"dog predicted as cat: 5 of 68", "cat predicted as other classes: 4 of 36"} <= titles


def test_curves_skip_invalid_lines_and_count_a_repeated_step_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    events = [
        {"event": "start", "world_size": 2},
        {"event": "step", "step": 1, "epoch": 0.5, "loss": 9.0},
        {"event": "step", "step": 1, "epoch": 0.5, "loss": 2.0},
        {"event": "step", "step": 2, "epoch": 1.0, "loss": 1.0},
        {"event": "eval", "step": 2, "epoch": 1, "loss": 1.5, "accuracy": 0.75, "top5": None},
    ]
    lines = [json.dumps(event) for event in events]
    file.write_text("\n".join([*lines, '{"event": "step", "st']))
    assert training_curves(read_events(tmp_path / "none.jsonl")) == ""
    html = training_curves(read_events(file))
    assert "training 1, validation 1.5" in html
    assert "top 1 75.00%" in html
    assert "top 5" not in html
    loss = parse(re.findall(r"<svg.*?</svg>", html, re.DOTALL)[0])
    assert [e.get("class") for e in loss].count("dot") == 3


def heights(chart: str) -> list[list[float]]:
    """Return the heights of the points of each curve: 0 to 1."""
    root = parse(chart)
    paths = [e.attrib["d"] for e in root.iter(f"{NS}path") if e.get("class") == "curve"]
    return [
        [1 - float(pair.split()[1]) / 320 for pair in re.findall(r"[\d.]+ [\d.]+", path)]
        for path in paths
    ]


def test_an_axis_of_shares_leaves_out_a_low_first_epoch() -> None:
    shares = [0.132, 0.61, 0.85, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99]
    points = [(float(epoch), share) for epoch, share in enumerate(shares, 1)]
    chart = line_chart("Accuracy", [Series("top 1", points)], percent=True)
    drawn = heights(chart)[0]
    assert drawn[-1] - drawn[-6] > 0.15
    assert 0 <= min(drawn) < max(drawn) <= 1
    assert "below the axis: 13.2% at epoch 1" in chart
    assert "105%" not in chart


def test_losses_that_differ_tenfold_have_a_logarithmic_axis() -> None:
    losses = [7.3, 2.0, 0.5, 0.2, 0.1, 0.06]
    chart = line_chart("Loss", [Series("validation", list(enumerate(losses)))])
    drawn = heights(chart)[0]
    assert "logarithmic" in chart
    assert drawn[-2] - drawn[-1] > 0.08
    near = line_chart("Loss", [Series("validation", [(0, 1.2), (1, 1.0), (2, 0.0)])])
    assert "logarithmic" not in near


def test_a_resumed_training_has_marks_and_rates() -> None:
    events = [
        {"event": "start", "resumed_from_step": 0},
        {"event": "step", "step": 10, "epoch": 1.0, "loss": 2.0, "lr": 0.1, "images_per_s": 5.0},
        {"event": "checkpoint", "step": 10},
        {"event": "start", "resumed_from_step": 10},
        {"event": "step", "step": 30, "epoch": 3.0, "loss": 1.0, "lr": 0.0, "images_per_s": 7.0,
         "data_wait_fraction": 0.25},
    ]  # fmt: skip
    shown = training_curves(events)
    assert resumed_epochs(events) == [1.0]
    for words in ("resumed", "checkpoints", "Learning rate", "Images per second", "waiting"):
        assert words in shown


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


def ranks(*seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    rows = {phase: [rank.get(phase, 0.0) for rank in seconds] for phase in PHASES}
    return {"event": "ranks", "time": 9.0, "seconds": rows, **more}


def every(value: object) -> dict[str, object]:
    return {str(phase): value for phase in PHASES}


FAST = {"forward": 18.0, "backward": 45.0, "communication": 27.0}
SLOW = {"forward": 45.0, "backward": 45.0}


def test_the_section_has_phases_advice_and_the_slowest_ranks_first(tmp_path: Path) -> None:
    end = {"event": "end", "advice": ["rank 1 is slow"], "mfu": 0.41}
    events = [ranks(FAST, SLOW, nodes=["node-a", "node-b"]), end]
    folder = reports.make(tmp_path, ["a", "b"], [[9, 1], [1, 9]], events=downsample(events))
    content = text(report.html(folder))
    section = content[content.index("Where the time went") :]
    for words in (
        "90 s on each of 2 ranks forward 35.0% backward 50.0% communication 15.0%",
        "rank 1 is slow",
        "41.0 % of the peak of its devices (MFU)",
        "1 node-b 0.0 45.0 45.0 0.0 0.0 0 node-a 0.0 18.0 45.0 27.0 0.0",
    ):
        assert words in section


def test_attempts_with_equal_ranks_are_added() -> None:
    other = ranks(SLOW, SLOW, SLOW)
    events = [ranks(FAST, SLOW), {"event": "start"}, other, ranks(FAST, SLOW)]
    content = text("</style>" + str(time_section(events)))
    assert "3 min on each of 2 ranks, 2 attempts" in content


def test_only_the_slowest_of_many_ranks_are_shown() -> None:
    many = [FAST] * 999 + [SLOW]
    content = text("</style>" + str(time_section([ranks(*many)])))
    assert "the slowest 16 of 1,000" in content
    table = content[content.index("optimizer ") + len("optimizer ") :]
    assert table.startswith("999 0.0 45.0 45.0")
    assert table.count(" 27.0 ") == 15


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"seconds": {"data": [1.0]}},
        {"seconds": every(["x"])},
        {"seconds": every([-1.0])},
        {"seconds": {**every([1.0]), "data": [1.0, 2.0]}},
        {"seconds": every([])},
    ],
)
def test_invalid_events_are_ignored(broken: dict[str, Any]) -> None:
    assert time_section([{"event": "ranks", **broken}]) == ""
