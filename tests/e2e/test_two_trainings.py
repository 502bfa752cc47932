"""Two trainings of one run share its claims and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl, kubernetes

from kfp_ddp.components.train.component import train
from tests.e2e.harness.scene import DATA, WORK, Scene
from tests.e2e.harness.training import LOOP, TRAINING, WORKERS
from tests.e2e.harness.trainings import compiled, sync_only

pytestmark = pytest.mark.smoke

RATES = {"train": 0.1, "train-2": 0.001}


def _task(rate: float, dataset_path: str) -> Any:
    task = train(
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
        task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
        dataset_path=dataset_path,
        training={**LOOP, "model": "cifar_resnet8", "epochs": 3, "learning_rate": rate},
        job={**WORKERS, "nodes": 1, "nproc_per_node": 1},
    ).set_caching_options(False)
    kubernetes.mount_pvc(task, pvc_name=DATA, mount_path="/data")
    return kubernetes.mount_pvc(task, pvc_name=WORK, mount_path="/work")


def test_two_train_tasks_of_one_run_are_separate(scene: Scene, tmp_path: Path) -> None:
    named = {"source": TRAINING["source"], **TRAINING["sync"]}
    synced = scene.run(compiled(sync_only, tmp_path), data_claim=DATA, **named).play()
    assert synced.succeeded, synced.explain()

    @dsl.pipeline(name="two-trainings")  # type: ignore[untyped-decorator]
    def pipeline(dataset_path: str) -> None:
        for rate in RATES.values():
            _task(rate, dataset_path)

    compiler.Compiler().compile(pipeline, str(tmp_path / "two.yaml"))
    path = synced.steps["data-sync"].outputs["path"]
    run = scene.run(tmp_path / "two.yaml", dataset_path=path).play()

    assert run.succeeded, run.explain()
    folders = scene.work.names(run.id)
    assert {name.partition(".")[0] for name in folders} == RATES.keys()
    assert len(scene.grounds.jobs(run.id)) == len(RATES)
    models = {name: run.steps[name].outputs["trained_model"].metadata for name in RATES}
    assert len({model["digest"] for model in models.values()}) == len(RATES)
    for folder in folders:
        config = scene.work.read(f"{run.id}/{folder}config.json")
        assert config is not None
        assert json.loads(config)["learning_rate"] == RATES[folder.partition(".")[0]]
        assert scene.work.events(f"{run.id}/{folder}metrics.jsonl")[0]["resumed_from_step"] == 0
