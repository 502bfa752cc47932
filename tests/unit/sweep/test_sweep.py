"""What a sweep tries, how far it trains each trial, and what it remembers when it is killed."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import yaml_of
from kfp_ddp.plan.sweep import Sweep, examples_of
from kfp_ddp.runs.train.engine import figures_of
from kfp_ddp.runs.trials import TrialRecord, read_trials, table
from kfp_ddp.sweep.leaderboard import Leaderboard, read
from kfp_ddp.sweep.study import Result, Study, Trial, search
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import Manifest

RATES = [round(0.01 * (number + 1), 2) for number in range(16)]
RANGE = {"learning_rate": {"min": 0.001, "max": 1.0, "log": True}}


class Trainer:
    """Lists trainings; the accuracy rises by epoch, and with the learning rate."""

    def __init__(self, killed_after: int = 10_000) -> None:
        self.done: list[tuple[int, int]] = []
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        self._killed_after = killed_after

    def __call__(self, trial: Trial) -> Result:
        epochs, rate = trial.rungs[trial.level], trial.settings["learning_rate"]
        with self._lock:
            if len(self.done) == self._killed_after:
                raise KeyboardInterrupt
            self.done.append((trial.number, epochs))
            self._now += 1
            self.most = max(self.most, self._now)
        with self._lock:
            self._now -= 1
        if rate == 0.05:
            return Result(ended="no memory")
        return Result(min(rate, 0.5) + 0.01 * epochs, f"step-{epochs}", hours=epochs / 10)


def played(
    folder: Path, trainer: Callable[[Trial], Result], at_once: int = 0, **settings: Any
) -> tuple[Study, list[Trial]]:
    folder.mkdir(exist_ok=True)
    create = partial(TrainConfig.create, data="/d", output_dir="/o")
    sweep = Sweep.create(**settings)
    study = Study(folder / "study.jsonl", sweep, lambda found: create(**{"epochs": 9, **found}))
    search(study, trainer, at_once, lambda: None)
    return study, study.trials


GRID: dict[str, Any] = {"space": {"learning_rate": RATES}, "reduction_factor": 3}


@pytest.mark.parametrize("at_once", [0, 3])
def test_the_best_third_goes_on_at_each_rung(tmp_path: Path, at_once: int) -> None:
    trainer = Trainer()
    _, trials = played(tmp_path, trainer, at_once, **GRID)
    assert [trial.settings["learning_rate"] for trial in trials] == RATES
    assert [trial.number for trial in trials if trial.failed] == [4]
    by_level = Counter(trial.level for trial in trials)
    if at_once:
        assert trainer.most <= 3
        assert by_level[2] >= 1
    else:  # 15 at the first rung
        assert by_level == {0: 11, 1: 4, 2: 1}
        assert Counter(epochs for _, epochs in trainer.done) == {1: 16, 3: 5, 9: 1}
    assert trials[15].accuracies == pytest.approx([0.17, 0.19, 0.25])


def test_trials_without_halving_a_budget_and_a_space_without_more(tmp_path: Path) -> None:
    lists = {"learning_rate": [0.1, 0.2]}
    both: dict[str, Any] = {"space": lists, "trials": [{"epochs": 2, "learning_rate": 0.3}]}
    _, trials = played(tmp_path / "1", Trainer(), **both)
    assert [trial.rungs for trial in trials] == [[2], [9], [9]]
    for sampler in ("random", "tpe"):
        _, trials = played(tmp_path / sampler, Trainer(), space=lists, samples=9, sampler=sampler)
        assert sorted(trial.settings["learning_rate"] for trial in trials) == [0.1, 0.2]
    study, trials = played(tmp_path / "2", Trainer(), space=RANGE, sampler="tpe", max_gpu_hours=4)
    assert study.spent == "max_gpu_hours=4"
    assert len(trials) == 5  # of 0.9 hours
    _, trials = played(tmp_path / "3", Trainer(), **GRID, max_gpu_hours=2)
    assert 3 < len(trials) < 16
    assert max(trial.level for trial in trials) == 2  # one is complete before the end


ENDS = [
    *({"min": 0.99, "max": 0.9999}, {"min": 0.0, "max": 1e-4}, {"min": 0.98765, "max": 0.98766}),
    *({"min": "1e-5", "max": "9e-1", "log": True}, {"min": 0.998, "max": 0.999, "log": True}),
]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize("ends", ENDS)
def test_values_are_as_fine_as_their_range(
    tmp_path: Path, ends: dict[str, Any], sampler: str
) -> None:
    space: dict[str, Any] = {"space": {"ema_decay": ends}, "samples": 60, "sampler": sampler}
    study, trials = played(tmp_path / "s", lambda _: Result(0.5, "step-1"), **space)
    values = [trial.settings["ema_decay"] for trial in trials]
    assert len(set(values)) > 50
    assert all(float(ends["min"]) <= value <= float(ends["max"]) for value in values)
    assert max(len(repr(value)) for value in values) <= 10
    proposed = study._study.get_trials()
    known = {trial.proposal: proposed[trial.proposal].params["ema_decay"] for trial in trials}
    assert list(known.values()) == values


def test_values_of_a_sweep_have_the_type_of_their_setting() -> None:
    text = yaml_of(
        "trials: [{learning_rate: 1e-3, epochs: '3'}, {learning_rate: 0.001, epochs: 4}]\n"
        "space: {weight_decay: [1e-4, '5e-4'], epochs: {min: 2.0, max: '9'}, pretrained: [true]}"
    )
    examples = examples_of(Sweep.create(**text, samples=2))
    first = {"weight_decay": 0.0001, "epochs": 2, "pretrained": "true"}
    assert examples == [
        *({"learning_rate": 0.001, "epochs": 3}, {"learning_rate": 0.001, "epochs": 4}),
        *(first, {**first, "weight_decay": 0.0005}, first, {**first, "epochs": 9}, first),
    ]
    assert {type(one["epochs"]) for one in examples} == {int}
    for values in ([1e-3, "1e-3"], [0.1, 0.2, 0.1]):
        with pytest.raises(InputError, match=r"learning_rate has 0.* twice"):
            examples_of(Sweep.create(space={"learning_rate": values}))


def test_a_proposal_that_cannot_be_trained_fails_alone(tmp_path: Path) -> None:
    rates = [{"learning_rate": 11}, {"learning_rate": 0.1}]
    _, (wrong, good) = played(tmp_path, Trainer(), trials=rates)
    assert (wrong.failed, good.failed) == (True, False)
    assert "learning_rate" in wrong.ended


KILLED = [GRID, {"space": RANGE, "samples": 12, "sampler": "tpe", "reduction_factor": 3}]


@pytest.mark.parametrize("killed", range(1, 17, 3))
@pytest.mark.parametrize("settings", KILLED, ids=["grid", "tpe"])
def test_killed_sweep_continues(tmp_path: Path, killed: int, settings: dict[str, Any]) -> None:
    _, expected = played(tmp_path / "whole", whole := Trainer(), **settings)
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path / "part", first := Trainer(killed), **settings)
    journal = tmp_path / "part" / "study.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 2, "wor')  # the write that the kill interrupted
    _, trials = played(tmp_path / "part", second := Trainer(), **settings)
    assert trials == expected
    assert first.done + second.done == whole.done
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def training(path: Path, accuracies: list[float], loss: float = 1.0, **settings: Any) -> None:
    """Write the folder of a training with ten steps and a checkpoint in each epoch."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"output_dir": str(path), **settings}))
    events: list[dict[str, Any]] = [{"event": "start", "steps_total": 30}]
    for epoch, accuracy in enumerate(accuracies, 1):
        figures = {"epoch": epoch, "accuracy": accuracy, "loss": loss}
        events.append({"event": "eval", "step": 10 * epoch, **figures})
    reason = "behind" if len(accuracies) < 3 else ""
    events.append({"event": "end", "status": "done", "reason": reason})
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))


def board(folder: Path, trials: list[Trial]) -> tuple[Leaderboard, str, str]:
    """Return the leaderboard of trials, its page and its table."""
    page, table = (
        SimpleNamespace(path=str(folder / name), metadata={}) for name in ("page", "table")
    )
    study: Any = SimpleNamespace(trials=trials, spent="")
    names = ["peak", "low", "same", "early", "gone"]
    shown = Leaderboard(study, 5, lambda trial: str(folder / names[trial.number]), page, table)
    shown.show()
    return shown, Path(page.path).read_text(), Path(table.path).read_text()


def test_rank_is_by_accuracy_then_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "peak", [0.9, 0.5, 0.4], learning_rate=0.4, model="a")
    training(tmp_path / "low", [0.2, 0.3, 0.8], 0.7, learning_rate=0.1, model="a")
    training(tmp_path / "same", [0.2, 0.3, 0.8], 0.5, learning_rate=0.2, model="a")
    training(tmp_path / "early", [0.0], learning_rate=0.01, model="a")
    done: dict[str, Any] = {"rungs": [3], "accuracies": [0.5]}
    trials = [Trial(at, {}, checkpoint="x/step-00000030", **done) for at in range(3)]
    trials.append(Trial(3, {}, checkpoint="x/step-00000010", **done))
    trials[3].ended = read(str(tmp_path / "early"), "").ended
    trials.append(Trial(4, {"learning_rate": 7}, failed=True, ended="rank 0: <b>no</b> memory"))
    shown, page, table = board(tmp_path, trials)
    assert shown.best().number == 2
    expected = {"trials": 5, "failed": 1, "ended_early": 1, "best_accuracy": 0.8, "hours": 0}
    assert shown.figures() == expected
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["1", "0.2", "80.00%"],
        ["2", "0.1", "80.00%"],
        ["3", "0.4", "40.00%"],
        ["4", "0.01", "0.00%"],
        ["", "7", ""],
    ]
    assert rows[3][-1] == "behind"
    assert "model" not in table.splitlines()[0]  # which is equal in all
    assert "&lt;b&gt;no&lt;/b&gt; memory" in page
    assert "learning_rate: 0.01 to 0.4" in page
    for trial in trials:
        trial.failed, trial.ended = True, trial.ended or "no card"
    with pytest.raises(JobError, match="all 5 trials failed; the first: no card"):
        shown.best()
    assert "5 of at most 5 trials" in capsys.readouterr().out


def test_the_accuracy_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    training(tmp_path / "peak", [0.9, 0.5, 0.4], learning_rate=0.4)
    training(tmp_path / "low", [0.2, 0.3, 0.8], learning_rate=0.1)
    trials = [Trial(at, {}, rungs=[3], accuracies=[0.1]) for at in range(2)]
    trials[0].checkpoint, trials[1].checkpoint = "step-00000010", "step-00000030"
    shown, *_ = board(tmp_path, trials)
    assert (shown.best().number, shown.figures()["best_accuracy"]) == (0, 0.9)
    again = {"event": "eval", "step": 10, "epoch": 1, "accuracy": 0.85, "loss": 1.0}
    with Path(tmp_path, "peak", "metrics.jsonl").open("a") as file:  # a resume repeats that step
        file.write(f"\n{json.dumps(again)}")
    assert board(tmp_path, trials)[0].figures()["best_accuracy"] == 0.85
    newest = Manifest(Path("step-00000010"), 10, "", {})
    assert figures_of(tmp_path / "peak", newest)["val_accuracy"] == 0.85


def test_trials_are_recorded_and_fit_a_terminal(tmp_path: Path) -> None:
    training(tmp_path / "peak", [0.9, 0.5, 0.4], learning_rate=0.4, model="a")
    training(tmp_path / "low", [0.2, 0.3, 0.8], 0.7, learning_rate=0.1, model="a")
    done: dict[str, Any] = {"rungs": [3], "accuracies": [0.5], "hours": 0.25}
    trials = [
        Trial(0, {"learning_rate": 0.4}, checkpoint="x/step-00000030", **done),
        Trial(1, {"learning_rate": 0.1}, checkpoint="x/step-00000030", **done),
        Trial(2, {"model": "gone"}, failed=True, ended=f"rank 0: no \x1b[2J {'memory ' * 40}"),
    ]
    (tmp_path / "run" / "tune").mkdir(parents=True)
    shown, *_ = board(tmp_path, trials)
    shown.show().write(tmp_path / "run" / "tune")
    records = read_trials(tmp_path / "run")
    assert [(one.task, one.rank, one.accuracy) for one in records] == [
        *(("low", 1, 0.8), ("peak", 2, 0.4)),
        ("same", 0, None),
    ]
    assert [one.settings for one in records][1:] == [{"learning_rate": 0.4}, {"model": "gone"}]
    first, titles, best, *others = table(records, 80)
    assert "the best 3 of 3; 0.5 hours" in first
    assert titles.split() == ["accuracy", "loss", "epochs", "settings"]
    assert best.split() == ["1", "80.0%", "0.7000", "3", "learning_rate=0.1"]
    assert "\\x1b[2J" in "\n".join(others)
    assert max(map(len, others)) <= 80
    many = [records[0]] * 50
    assert len(list(table(many, 80))) == 22
    (tmp_path / "run" / "tune" / "trials.json").write_text('{"trials": [{"rank": "x"}]}')
    assert list(table(read_trials(tmp_path / "run"), 80)) == []


def test_folds_have_a_mean_for_each_setting() -> None:
    accuracies = {0.1: (0.8, 0.9, 0.85), 0.4: (0.7, 0.9, None), 0.8: (0.6, None, None)}
    trials = [
        TrialRecord(task="t", settings={"learning_rate": rate, "fold": f"{n}/3"}, accuracy=value)
        for rate, values in accuracies.items()
        for n, value in enumerate(values, 1)
    ]
    lines = [line.split() for line in table(trials, 80)][11:]
    # scipy.stats.ttest_1samp([0.8, 0.9, 0.85], 0).confidence_interval(): 0.7258 to 0.9742
    first = "mean 85.0% of 3 folds, interval 72.6% to 97.4% learning_rate=0.1"
    second = "mean 80.0% of 2 folds, interval 0.0% to 100.0% learning_rate=0.4"
    assert lines == [first.split(), second.split()]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 1.0),
        ({"reduction_factor": 3}, (1 + 2 / 3 + 6 / 9) / 9),
        ({"reduction_factor": 2}, 41 / 16 / 9),
    ],
)
def test_the_halving_ends_part_of_the_epochs(settings: dict[str, Any], share: float) -> None:
    assert Sweep.create(**settings).share(9) == pytest.approx(share)
