"""What happens to a training while its step waits: losses, cancels, evictions, and plain faults."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness.grounds import patiently, until
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import DATA, WORK, Scene
from tests.e2e.harness.train_only import WORKERS, compiled

Begin = Callable[..., Run]


@pytest.fixture(scope="module")
def begin(scene: Scene, local_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """Begin a run of the train step alone, on the dataset that the whole pipeline has synced."""
    document = compiled(tmp_path_factory.mktemp("train-only"))
    assert local_run.succeeded, local_run.explain()

    def start(**arguments: Any) -> Run:
        given = {
            "dataset_path": local_run.steps["data-sync"].outputs["path"],
            "data_claim": DATA,
            "work_claim": WORK,
            "cluster": WORKERS,
        }
        return scene.run(document, **given | arguments).start()

    return start


def test_a_step_that_loses_its_pod_takes_up_the_one_job(scene: Scene, begin: Begin) -> None:
    """Force-deleted twice, at any instant: one job ever, trained once, and the step succeeds."""
    run = begin(epochs=60)
    jobs = _Seen(scene, run)
    draw = random.Random(run.id)
    for losses in (0, 1):
        until(lambda lost=losses: _attempts(run) > lost, "the step")  # type: ignore[misc]
        time.sleep(draw.uniform(1, 8))
        scene.grounds.core.delete_namespaced_pod(
            run.steps["train"].pod, scene.grounds.namespace, grace_period_seconds=0
        )
    run.wait()

    assert run.succeeded, run.explain()
    assert len(run.steps["train"].attempts) == 3
    assert len(jobs.stop()) == 1
    assert len(_starts(scene, run)) == 1


def test_a_terminated_run_has_no_job_two_seconds_later(scene: Scene, begin: Begin) -> None:
    run = begin(epochs=1000)
    until(lambda: "epoch 1/" in _log(run), "the first epoch")
    asked = time.monotonic()
    ending = threading.Thread(target=run.terminate)
    ending.start()
    until(lambda: not _jobs(scene, run), "the end of the job", 30)
    seconds = time.monotonic() - asked
    ending.join()
    run.wait()

    assert run.succeeded is False
    assert {name: step.succeeded for name, step in run.steps.items()} == {
        "train": False,
        "teardown": True,
    }
    assert seconds < 2
    until(lambda: not _pods(scene, run), "the end of the workers", 150)


def test_a_killed_worker_costs_only_what_came_after_the_checkpoint(
    scene: Scene, begin: Begin, local_run: Run
) -> None:
    run = begin()
    until(lambda: "epoch 7/" in _log(run), "a checkpoint")
    worker = next(pod for pod in _pods(scene, run) if "worker" in pod)
    scene.grounds.core.delete_namespaced_pod(
        worker, scene.grounds.namespace, grace_period_seconds=0
    )
    run.wait()

    assert run.succeeded, run.explain()
    starts = _starts(scene, run)
    assert len(starts) >= 2
    assert starts[-1]["resumed_from_step"] > 0


class _Seen:
    """Every job of a run that there ever was, by uid."""

    def __init__(self, scene: Scene, run: Run) -> None:
        self._scene, self._run, self._uids = scene, run, set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.is_set():
            self._uids |= {job["metadata"]["uid"] for job in _jobs(self._scene, self._run)}
            time.sleep(0.3)

    def stop(self) -> set[str]:
        """Their uids."""
        self._over.set()
        self._thread.join()
        return self._uids


def _jobs(scene: Scene, run: Run) -> list[dict[str, Any]]:
    found = patiently(
        lambda: scene.grounds.custom.list_namespaced_custom_object(
            "kubeflow.org",
            "v1",
            scene.grounds.namespace,
            "pytorchjobs",
            label_selector=f"kfp-ddp/run-id={run.id}",
        )
    )
    items: list[dict[str, Any]] = found["items"]
    return items


def _pods(scene: Scene, run: Run) -> list[str]:
    """The run's workers that are not over."""
    found = patiently(
        lambda: scene.grounds.core.list_namespaced_pod(
            scene.grounds.namespace, label_selector=f"kfp-ddp/run-id={run.id}"
        )
    )
    return [p.metadata.name for p in found.items if p.status.phase in ("Pending", "Running")]


def _starts(scene: Scene, run: Run) -> list[dict[str, Any]]:
    return [event for event in scene.events(run) if event["event"] == "start"]


def _attempts(run: Run) -> int:
    return len(run.steps["train"].attempts) if "train" in run.steps else 0


def _log(run: Run) -> str:
    return run.steps["train"].log if "train" in run.steps else ""
