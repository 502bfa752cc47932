import json
from pathlib import Path

import pytest
from PIL import Image

from kfp_ddp.training import rank
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.saving import behind


def beside(folder: Path, name: str, accuracies: list[float]) -> Path:
    (folder / name).mkdir()
    events = [
        {"event": "eval", "step": 10 * epoch, "epoch": float(epoch), "accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, 1)
    ]
    lines = [json.dumps(event) for event in ({"event": "start"}, *events)]
    (folder / name / "metrics.jsonl").write_text("\n".join(lines) + '\n{"event": "ev')
    return folder / name


@pytest.mark.parametrize(
    ("epoch", "best", "reason"),
    [
        (1, 0.29, "after epoch 1 its best accuracy, 29.00%, is below 40.00%, the median of 3"),
        (1, 0.40, ""),
        (2, 0.49, "after epoch 2 its best accuracy, 49.00%, is below 50.00%, the median of 2"),
        (3, 0.10, ""),  # one alone is as far
    ],
)
def test_a_training_is_behind_when_it_is_below_the_median_of_others_at_its_epoch(
    tmp_path: Path, epoch: int, best: float, reason: str
) -> None:
    own = beside(tmp_path, "own", [1.0, 1.0, 1.0])
    beside(tmp_path, "first", [0.3, 0.2, 0.9])
    beside(tmp_path, "second", [0.4, 0.7])
    beside(tmp_path, "third", [0.5])
    (tmp_path / "none").mkdir()
    found = behind(own, epoch, best)
    assert found.startswith(reason) if reason else not found


def test_a_training_alone_is_never_behind(tmp_path: Path) -> None:
    assert behind(beside(tmp_path, "own", [0.5]), 1, 0.0) == ""


@pytest.mark.parametrize(("first", "epochs"), [(2, 2), (0, 3)])
def test_a_training_that_is_behind_ends_after_that_epoch_and_says_why(
    tmp_path: Path, first: int, epochs: int
) -> None:
    for name in ("one", "two"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        beside(tmp_path / "runs", name, [1.0, 1.0, 1.0])
    for label in ("cat", "dog"):
        for number in range(8):  # the same picture: neither can be told from the other
            path = tmp_path / "data" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (90, 90, 90)).save(path)
    config = TrainConfig.create(
        data=str(tmp_path / "data"),
        output_dir=str(tmp_path / "runs" / "own"),
        model="cifar_resnet8",
        image_size=8,
        epochs=3,
        workers=0,
        val_fraction=0.3,
        stop_behind_epochs=first,
    )
    assert rank.run(config)
    lines = (tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert sum(event["event"] == "eval" for event in events) == epochs
    reason = events[-1]["reason"]
    assert ("the median of 2 others" in reason) == bool(first)
    assert [event["event"] for event in events][-3:] == ["checkpoint", "ranks", "end"]
