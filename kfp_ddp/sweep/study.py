"""The trials of a sweep in a journal: what is tried, how far each trains, what goes on next.

The journal is that of an Optuna study, with the progress of each trial in it. It is written before
a training starts and after it ended, so that another process continues where this one was.
"""

import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError, RunCancelledError
from kfp_ddp.core.machine import require
from kfp_ddp.plan.sweep import Sweep, draw, key_of, listed
from kfp_ddp.training.spec.config import TrainConfig

if TYPE_CHECKING:
    import optuna

TRIES = 50
"""Proposals in a row that were tried before, after which a space has no others."""
LOOK_SECONDS = 60.0
"""Time after which the progress is shown without a change."""
LEAVE_SECONDS = 10.0


@dataclass
class Trial:
    """A trial as the journal records it."""

    number: int
    settings: dict[str, Any]
    proposal: int = -1
    """Number of Optuna's trial that proposed it; -1 for an explicit trial and one of a grid."""
    rungs: list[int] = field(default_factory=list)
    """Epochs at which it is compared with others; the last one is the end of its training."""
    level: int = 0
    """Number of the rung that it trains to, or reached last."""
    accuracies: list[float] = field(default_factory=list)
    """Accuracy at each rung that it reached."""
    checkpoint: str = ""
    hours: float = 0.0
    """Hours of all ranks."""
    ended: str = ""
    """Why it ended before its last epoch, other than by the halving; or why it failed."""
    failed: bool = False

    @property
    def trains(self) -> bool:
        """Whether it trains, or did when the last process ended."""
        return not self.failed and len(self.accuracies) <= self.level

    @property
    def can_go_on(self) -> bool:
        """Whether it waits at a rung before its last one."""
        if self.failed or self.ended:
            return False
        is_last = self.level == len(self.rungs) - 1
        return not (self.trains or is_last)

    @property
    def is_complete(self) -> bool:
        """Whether it was trained as far as it may."""
        return not (self.failed or self.trains or self.can_go_on)


@dataclass(frozen=True)
class Result:
    """What a training to a rung gave; without a checkpoint it failed."""

    accuracy: float = 0.0
    checkpoint: str = ""
    hours: float = 0.0
    ended: str = ""


class Study:
    """The trials of a sweep, and the proposals of others."""

    def __init__(
        self, file: Path, sweep: Sweep, configure: Callable[[dict[str, Any]], TrainConfig]
    ) -> None:
        """Open a journal or create it; `configure` returns a trial's training or InputError."""
        self.sweep = sweep
        self.configure = configure
        self.listed = listed(sweep)
        self._study = _open(file)
        records = self._study.user_attrs
        numbers = filter(str.isdecimal, sorted(records))
        self.trials = [Trial(**records[number]) for number in numbers]
        self.began: float = records.get("began", time.time())
        self._study.set_user_attr("began", self.began)

    @property
    def spent(self) -> str:
        """Which budget is used up; empty for none."""
        sweep = self.sweep
        hours = sum(trial.hours for trial in self.trials)
        if 0 < sweep.max_gpu_hours <= hours:
            return f"max_gpu_hours={sweep.max_gpu_hours:g}"
        if 0 < sweep.max_minutes * 60 <= time.time() - self.began:
            return f"max_minutes={sweep.max_minutes:g}"
        return ""

    def next(self, running: Collection[int]) -> Trial | None:
        """Return the trial to train now, to its `level`; None if there is none at present.

        First those that an earlier process started. With a budget of time promotions come next, so
        that a trial is complete at its end; otherwise all trials reach the first rung before.
        """
        for started in self.trials:
            if started.trains and started.number not in running:
                return started
        if self.spent:
            return None
        if self.sweep.timed:
            trial = self._promote() or self._propose()
        else:
            trial = self._propose() or self._promote()
        if trial is not None or running:
            return trial
        # The halving may stop all: then the best goes on, so that one is complete.
        if any(trial.is_complete for trial in self.trials):
            return None
        return self._promote(at_least=1)

    def record(self, trial: Trial, result: Result) -> None:
        """Record how the training of a trial to its rung ended."""
        trial.hours = max(trial.hours, result.hours)
        trial.ended = result.ended
        trial.failed = not result.checkpoint
        if result.checkpoint:
            trial.accuracies.append(result.accuracy)
            trial.checkpoint = result.checkpoint
        if trial.proposal >= 0:
            self._tell(trial.proposal, trial)
        self._save(trial)

    def _promote(self, at_least: int = 0) -> Trial | None:
        """Return a trial that goes on from the highest rung at which one may."""
        factor = self.sweep.reduction_factor
        levels = max((len(trial.rungs) for trial in self.trials), default=0)
        for level in reversed(range(levels)):
            reached = [trial for trial in self.trials if len(trial.accuracies) > level]
            best_first = sorted(reached, key=lambda trial: -trial.accuracies[level])
            # A factor of 0 means that there is no halving.
            passing = len(reached) // factor if factor else 0
            for trial in best_first[: max(at_least, passing)]:
                if trial.level == level and trial.can_go_on:
                    trial.level += 1
                    self._save(trial)
                    return trial
        return None

    def _propose(self) -> Trial | None:
        """Return a new trial; a proposal that cannot be trained is recorded as failed."""
        while (trial := self._new()) is not None:
            self.trials.append(trial)
            try:
                trial.rungs = self.sweep.rungs(self.configure(trial.settings).epochs)
            except InputError as error:
                self.record(trial, Result(ended=str(error)))
                continue
            self._save(trial)
            return trial
        return None

    def _new(self) -> Trial | None:
        number = len(self.trials)
        if number < len(self.listed):
            return Trial(number, self.listed[number])
        if number - len(self.listed) >= self.sweep.draws:
            return None
        known = {key_of(trial.settings): trial for trial in self.trials}
        for _ in range(TRIES):
            self._study.sampler = self._sampler()
            proposal = self._study.ask()
            settings = {
                name: draw(proposal, name, values) for name, values in self.sweep.space.items()
            }
            if (same := known.get(key_of(settings))) is None:
                return Trial(number, settings, proposal.number)
            self._tell(proposal.number, same)
        return None

    def _sampler(self) -> "optuna.samplers.BaseSampler":
        """Return the sampler of the next proposal; its seed depends on how many there were."""
        import optuna

        from kfp_ddp.sweep.sampler import RoundingSampler

        seed = (self.sweep.seed * 100_003 + len(self._study.get_trials(deepcopy=False))) % 2**32
        if self.sweep.sampler != "tpe":
            return RoundingSampler(optuna.samplers.RandomSampler(seed))
        first = max(4, min(10, self.sweep.draws // 3))
        return RoundingSampler(
            optuna.samplers.TPESampler(seed=seed, n_startup_trials=first, constant_liar=True)
        )

    def _tell(self, proposal: int, trial: Trial) -> None:
        """Give the sampler the accuracy of a trial at its first rung, once."""
        import optuna

        if trial.accuracies:
            self._study.tell(proposal, trial.accuracies[0], skip_if_finished=True)
        else:
            failed = optuna.trial.TrialState.FAIL
            self._study.tell(proposal, state=failed, skip_if_finished=True)

    def _save(self, trial: Trial) -> None:
        self._study.set_user_attr(f"{trial.number:06}", dataclasses.asdict(trial))


def _open(file: Path) -> "optuna.Study":
    """Open the study of a journal; a line that a killed process did not complete is removed."""
    require("sweep")
    import optuna
    from optuna.storages import journal

    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # One process writes, and a killed one would leave its lock.
    no_lock: Any = SimpleNamespace(acquire=lambda: True, release=lambda: None)
    storage = journal.JournalStorage(journal.JournalFileBackend(str(file), no_lock))
    return optuna.create_study(
        storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
    )


def search(
    study: Study, train: Callable[[Trial], Result], at_once: int, show: Callable[[], None]
) -> None:
    """Train until no trial goes on; `train` continues a trial to its level.

    With `at_once` 0 trials are trained in this thread, one after the other; otherwise as many
    threads wait for a job each. `show` is called after each training and periodically. An error of
    `train` is raised; the jobs of other trials then continue, and the next process adopts them.
    """
    ended: queue.Queue[tuple[Trial, Result | BaseException]] = queue.Queue()
    running: dict[int, threading.Thread] = {}

    def work(trial: Trial) -> None:
        try:
            ended.put((trial, train(trial)))
        except BaseException as error:  # noqa: BLE001  raised in the main thread
            ended.put((trial, error))

    while True:
        while len(running) < max(1, at_once) and (trial := study.next(running)):
            thread = threading.Thread(target=work, args=(trial,), daemon=True)
            running[trial.number] = thread
            if at_once:
                thread.start()
            else:  # ranks of this machine need the main thread, which gets the signals
                work(trial)
        if not running:
            return
        try:
            trial, result = ended.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            show()
            continue
        running.pop(trial.number)
        if isinstance(result, RunCancelledError):
            for thread in running.values():  # each deletes its job
                thread.join(LEAVE_SECONDS)
        if isinstance(result, BaseException):
            raise result
        study.record(trial, result)
        show()
