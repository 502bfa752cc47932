"""Charts and matrices of a report."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kfp_ddp.report.charts import Series, line_chart
from kfp_ddp.report.events import MAX_POINTS, read_events, resumed_epochs
from kfp_ddp.report.matrix import confusion_matrix
from kfp_ddp.report.training import training_curves

NS = "{http://www.w3.org/2000/svg}"


def parse(html: str) -> ET.Element:
    return ET.fromstring(str(html).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def test_a_curve_is_inside_its_axes_and_descends_with_the_loss() -> None:
    points = [(float(x), 100.0 / (1 + x)) for x in range(2000)]
    root = parse(line_chart("Loss", [Series("training", points)], "step"))
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
def test_empty_constant_and_infinite_series_are_drawn(
    points: list[tuple[float, float]],
) -> None:
    svg = line_chart("Loss", [Series("training", points)], "epoch")
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
    chart = line_chart("Accuracy", [Series("top 1", points)], "epoch", percent=True)
    drawn = heights(chart)[0]
    assert drawn[-1] - drawn[-6] > 0.15
    assert 0 <= min(drawn) < max(drawn) <= 1
    assert "below the axis: 13.2% at epoch 1" in chart
    assert "105%" not in chart


def test_losses_that_differ_tenfold_have_a_logarithmic_axis() -> None:
    losses = [7.3, 2.0, 0.5, 0.2, 0.1, 0.06]
    chart = line_chart("Loss", [Series("validation", list(enumerate(losses)))], "epoch")
    drawn = heights(chart)[0]
    assert "logarithmic" in chart
    assert drawn[-2] - drawn[-1] > 0.08
    near = line_chart("Loss", [Series("validation", [(0, 1.2), (1, 1.0), (2, 0.0)])], "epoch")
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
