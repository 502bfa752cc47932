"""Epochs of a sweep by halving, against the grid, whose trials all end.

All try 16 settings of a tiny network on scikit-learn's digits, one after the other, in this
process with one thread. Prerequisite: the `demo` and `sweep` extras.
"""

import contextlib
import io
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from kfp_ddp.core.step import handling_signals
from kfp_ddp.plan.sweep import Sweep
from kfp_ddp.sweep.leaderboard import read
from kfp_ddp.sweep.study import Result, Study, Trial, search
from kfp_ddp.training import rank
from kfp_ddp.training.spec.config import TrainConfig

EPOCHS, IMAGES = 9, 200
SPACE = {
    "learning_rate": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
    "batch_size": [32, 128],
}
SWEEPS: dict[str, dict[str, Any]] = {
    "grid": {"space": SPACE},
    "halving": {"space": SPACE, "reduction_factor": 3},
    "tpe": {
        "space": {**SPACE, "learning_rate": {"min": 0.001, "max": 3.0, "log": True}},
        "samples": 16,
        "sampler": "tpe",
        "reduction_factor": 3,
    },
}


def run() -> dict[str, float]:
    """Return epochs, and hours of the rank, to the best accuracy that all of them reach."""
    torch.set_num_threads(1)  # more of them wait for one another in so small a network
    with tempfile.TemporaryDirectory() as folder:
        data = _digits(Path(folder) / "data")
        curves = {name: _sweep(Path(folder) / name, data, name) for name in SWEEPS}
    best = {name: max(accuracy for _, _, accuracy in curve) for name, curve in curves.items()}
    target = min(best.values())
    figures: dict[str, float] = {}
    for name, curve in curves.items():
        epochs, hours, _ = next(point for point in curve if point[2] >= target)
        print(
            f"{name:8} best {best[name]:.2%} in {curve[-1][0]} epochs, {curve[-1][1] * 60:.1f} "
            f"minutes; {target:.2%} after {epochs} epochs, {hours * 60:.1f} minutes"
        )
        figures |= {f"{name}_epochs": curve[-1][0], f"{name}_epochs_to_target": epochs}
    grid = figures["grid_epochs"]
    ratios = {f"{name}_vs_grid": grid / figures[f"{name}_epochs"] for name in ("halving", "tpe")}
    return {**figures, **ratios}


def _sweep(folder: Path, data: Path, name: str) -> list[tuple[float, float, float]]:
    """Return the epochs and hours until the end of each training, and the best accuracy then."""
    folder.mkdir()
    sweep = Sweep.create(**SWEEPS[name])
    points: list[tuple[float, float, float]] = [(0, 0.0, 0.0)]
    configure = partial(_config, sweep, data)
    reached = dict[int, float]()

    def train(trial: Trial) -> Result:
        place = folder / f"trial.{trial.number}"
        epochs = trial.rungs[trial.level]
        fields = configure(trial.settings).explicit()
        config = TrainConfig.create(**{**fields, "output_dir": str(place), "stop_epochs": epochs})
        end = handling_signals(lambda got, _: sys.exit(128 + got), signal.SIGTERM, signal.SIGINT)
        with end, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            if not rank.run(config):  # it handles the signal, and returns
                sys.exit(128 + signal.SIGTERM)
        steps = sorted((place / "checkpoints").glob("step-*"))
        row = read(str(place), steps[-1].name if steps else "")
        ended = row.ended if row.epochs < epochs else ""
        result = Result(row.accuracy, steps[-1].name if steps else "", row.hours, ended)
        spent = points[-1][0] + row.epochs - reached.get(trial.number, 0)
        hours = points[-1][1] + row.hours - trial.hours
        reached[trial.number] = row.epochs
        points.append((spent, hours, max(points[-1][2], row.accuracy)))
        return result

    search(Study(folder / "study.jsonl", sweep, configure), train, 0, lambda: None)
    return points[1:]


def _config(sweep: Sweep, data: Path, trial: dict[str, Any]) -> TrainConfig:
    fields = {"model": "cifar_resnet8", "image_size": 8, "epochs": EPOCHS, "workers": 0}
    folders = {"data": str(data), "output_dir": "/unused"}
    return TrainConfig.create(**{**sweep.under("sgd"), **fields, **folders, **trial})


def _digits(folder: Path) -> Path:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(IMAGES):
        path = folder / str(digits.target[number]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15.9).astype("uint8")).convert("RGB").save(path)
    return folder
