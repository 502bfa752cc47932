"""Train the trials of a study, several at a time."""

import queue
import threading
from collections.abc import Callable

from kfp_ddp.core.errors import RunCancelledError
from kfp_ddp.sweep.study import Result, Study, Trial

LOOK_SECONDS = 60.0
"""Time after which the progress is shown without a change."""
LEAVE_SECONDS = 10.0


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
        if isinstance(result, BaseException):
            if isinstance(result, RunCancelledError):
                for thread in running.values():  # each deletes its job
                    thread.join(LEAVE_SECONDS)
            raise result
        study.record(trial, result)
        show()
