"""Launchers: of somebody's own command, of a job that changes its size, and one that is evicted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.job.component import job
from kfp_ddp.training.config import TrainConfig
from tests.e2e.harness.grounds import IMAGE, UID, until
from tests.e2e.harness.leftovers import leftovers
from tests.e2e.harness.play import Run
from tests.e2e.harness.running import evict
from tests.e2e.harness.scene import DATA, WORK, Scene
from tests.e2e.harness.trainings import Begin, log, starts, workers

pytestmark = pytest.mark.smoke

SAY = "import json, os; print('task', json.loads(os.environ['TF_CONFIG'])['task'])"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def test_a_tfjob_with_a_command_of_ones_own(scene: Scene, tmp_path: Path) -> None:
    @dsl.pipeline(name="own-command")  # type: ignore[untyped-decorator]
    def pipeline() -> None:
        job(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            kind="tfjob",
            image=IMAGE,
            command=["python3", "-c", SAY],
            nodes=2,
            settings={"run_as_user": UID, "ttl_seconds": 0},
        ).set_caching_options(False)

    run = scene.run(_compiled(pipeline, tmp_path)).play()

    assert run.succeeded, run.explain()
    log = run.steps["job"].log
    assert "[chief-0] task {'type': 'chief', 'index': 0}" in log, log
    assert "[worker-0] task {'type': 'worker', 'index': 0}" in log, log
    until(lambda: not any("tfjobs" in each for each in leftovers(scene.grounds)), "its TTL")


@pytest.mark.soak
def test_an_elastic_job_that_loses_a_worker_goes_on_from_its_checkpoint(
    scene: Scene, local_run: Run, tmp_path: Path
) -> None:
    config = TrainConfig(
        data=local_run.steps["data-sync"].outputs["path"],
        output_dir="/work/elastic",
        model="cifar_resnet8",
        image_size=16,
        epochs=60,
        batch_size=32,
        workers=0,
        checkpoint_epochs=2,
        checkpoint_minutes=0.0,
    )

    @dsl.pipeline(name="elastic")  # type: ignore[untyped-decorator]
    def pipeline() -> None:
        task = job(
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
            task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
            image="ghcr.io/kfp-ddp/trainer:0.1.0",
            command=["python3", "-m", "kfp_ddp.training.node", "--", *config.to_argv()],
            nodes=2,
            settings={
                "elastic": "1:2",
                "nproc_per_node": 1,
                "run_as_user": UID,
                "env": ENVIRONMENT,
            },
        ).set_caching_options(False)
        kubernetes.mount_pvc(task, pvc_name=DATA, mount_path="/data")
        kubernetes.mount_pvc(task, pvc_name=WORK, mount_path="/work")

    run = scene.run(_compiled(pipeline, tmp_path)).start()
    until(lambda: "epoch 5/" in _log(run) or run.succeeded is not None, "a checkpoint", 180)
    assert run.succeeded is None, run.explain()
    pods = scene.grounds.core.list_namespaced_pod(
        scene.grounds.namespace, label_selector=f"kfp-ddp/run-id={run.id}"
    ).items
    lost = max(pod.metadata.name for pod in pods)
    scene.grounds.core.delete_namespaced_pod(lost, scene.grounds.namespace, grace_period_seconds=0)
    run.wait()

    assert run.succeeded, run.explain()
    lines = scene.work.read("elastic/metrics.jsonl")
    assert lines is not None
    begun = [
        event for line in lines.splitlines() if (event := json.loads(line))["event"] == "start"
    ]
    assert begun[0]["world_size"] == 2
    assert len(begun) >= 2
    assert begun[-1]["resumed_from_step"] > 0


def test_an_evicted_launcher_that_ends_its_run_says_from_where_retry_goes_on(
    scene: Scene, begin: Begin
) -> None:
    """Argo saw its pod fail before it was gone: the exit handler deletes the job, ranks save."""
    # The longest that was measured: what is said is looked at, not how soon.
    run = begin(epochs=60, checkpoint_epochs=2, grace=0.72)
    until(lambda: "epoch 9/" in log(run) or run.succeeded is not None, "checkpoints", 240)
    assert run.succeeded is None, run.explain()
    evict(scene.grounds, run.steps["train"].pod, seen=True)
    run.wait()

    assert run.succeeded is False
    step = run.steps["train"]
    assert len(step.attempts) == 1
    said = re.search(r"launcher was evicted; Retry resumes from step (\d+) or later", log(run))
    assert said is not None, run.explain()
    assert step.attempts[0].error == f"main: Error (exit code 143): {said[0]}"
    assert run.steps["teardown"].succeeded, run.explain()
    until(lambda: not workers(scene, run), "the last checkpoint of the ranks", 180)
    stopped = scene.events(run)[-1]
    assert (stopped["event"], stopped["status"]) == ("end", "preempted")
    assert int(said[1]) > 0
    assert stopped["step"] >= int(said[1])

    again = run.retried().play()
    assert again.succeeded, again.explain()
    assert starts(scene, run)[-1]["resumed_from_step"] == stopped["step"]
    assert scene.events(run)[-1]["status"] == "done"


def _log(run: Run) -> str:
    return run.steps["job"].log if "job" in run.steps else ""


def _compiled(pipeline: Any, folder: Path) -> Path:
    path = folder / "pipeline.yaml"
    compiler.Compiler().compile(pipeline, str(path))
    return path
