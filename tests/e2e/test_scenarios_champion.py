"""Two overlapping recurring runs with the same champion."""

from pathlib import Path

import pytest
from kfp import compiler, dsl, kubernetes
from kubernetes import client

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate
from kfp_ddp.components.publish.component import publish
from tests.e2e.harness.grounds import IMAGE
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import WORK, Scene, make_scene

EXPORTS = "models/squares"


@dsl.component(base_image=IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def prepare(run_dir: str, data: str, seed: int) -> str:
    """Write the outputs of a train step: a network of this seed, and images."""
    from pathlib import Path

    import torch
    from PIL import Image

    from kfp_ddp.training import checkpoint
    from kfp_ddp.training.config import TrainConfig
    from kfp_ddp.training.model import build

    Path("/work/models").mkdir(exist_ok=True)
    for name, colour in (("blue", (9, 9, 200)), ("red", (200, 9, 9))):
        split = Path(data, "val", name)
        split.mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (16, 16), colour).save(split / f"{number}.png")
    config = TrainConfig(data=data, output_dir=run_dir, model="cifar_resnet8")
    torch.manual_seed(seed)
    state = {"model": build(config.model, 2).state_dict(), "ema": None}
    manifest = checkpoint.manifest_of(
        config.model_copy(update={"image_size": 16}), ("blue", "red"), epoch=1, world_size=1
    )
    return str(checkpoint.write(Path(run_dir, "checkpoints"), 1, state, manifest))


@dsl.component(base_image=IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def wait_for_all(folder: str, run_id: str, runs: int, version: str) -> str:
    """Wait until all runs have a verdict; return the version that this one compared with."""
    import os
    import time

    os.makedirs(folder, exist_ok=True)
    open(f"{folder}/{run_id}", "w").close()
    while len(os.listdir(folder)) < runs:
        time.sleep(0.2)
    return version


@dsl.pipeline(name="last-steps")  # type: ignore[untyped-decorator]
def last_steps(
    run_dir: str, data: str, seed: int, meeting: str, runs: int, work_claim: str
) -> None:
    """The steps after a training, with a wait between gate and publish."""
    trained = prepare(run_dir=run_dir, data=data, seed=seed)
    evaluated = evaluate(
        checkpoint=trained.output,
        run_dir=run_dir,
        dataset_path=data,
        champion=f"/work/{EXPORTS}",
    )
    exported = export(
        checkpoint=trained.output,
        run_dir=run_dir,
        dataset_path=data,
        evaluation=evaluated.outputs["evaluation"],
        model_name="squares",
    )
    verdict = gate(
        accuracy=evaluated.outputs["accuracy"],
        evaluation=evaluated.outputs["evaluation"],
        bundle=exported.outputs["Output"],
        rules={"min_improvement": -1.0},
        champion=f"/work/{EXPORTS}",
    )
    met = wait_for_all(
        folder=meeting,
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        runs=runs,
        version=verdict.outputs["champion_version"],
    )
    published = publish(
        bundle=exported.outputs["Output"],
        evaluation=evaluated.outputs["evaluation"],
        model_name="squares",
        destination="/work/models",
        champion=f"/work/{EXPORTS}",
        champion_version=met.output,
    )
    for task in (trained, evaluated, exported, verdict, met, published):
        kubernetes.mount_pvc(task, pvc_name=work_claim, mount_path="/work")
        task.set_caching_options(False).set_cpu_request("50m")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("last-steps") / "last_steps.yaml"
    compiler.Compiler().compile(last_steps, str(path))
    return path


def test_one_of_two_runs_wins(cluster: client.ApiClient, tmp_path: Path, document: Path) -> None:
    with make_scene(cluster, tmp_path, {}) as scene:
        first = begin(scene, document, seed=0, meeting="alone", runs=1).wait()
        assert first.succeeded, first.explain()
        champion = read_pointer(scene)
        assert first.steps["gate"].outputs["champion_version"] == ""
        assert exported(first) == champion

        both = [begin(scene, document, seed=n, meeting="both", runs=2) for n in (1, 2)]
        for run in both:
            run.wait()
            assert run.succeeded, run.explain()
            assert run.steps["gate"].outputs["champion_version"] == champion
        late = [run for run in both if "is not the champion any more" in run.steps["publish"].log]
        assert len(late) == 1, "\n".join(run.explain() for run in both)
        (won,) = (run for run in both if run not in late)
        assert read_pointer(scene) == exported(won) != champion
        assert (
            f"{exported(late[0])} was uploaded, but {champion}, which it was compared with, is not "
            f"the champion any more: CHAMPION names {exported(won)} "
        ) in late[0].steps["publish"].log
        assert scene.work.read(f"{EXPORTS}/{exported(late[0])}/_SUCCESS")


def begin(scene: Scene, document: Path, *, seed: int, meeting: str, runs: int) -> Run:
    return scene.run(
        document,
        run_dir=f"/work/runs/{seed}",
        data=f"/work/data/{seed}",
        seed=seed,
        meeting=f"/work/meetings/{meeting}",
        runs=runs,
        work_claim=WORK,
    ).start()


def read_pointer(scene: Scene) -> str:
    content = scene.work.read(f"{EXPORTS}/CHAMPION")
    assert content is not None
    return content.decode().strip()


def exported(run: Run) -> str:
    """The version that a run has uploaded."""
    return str(run.steps["publish"].outputs["destination"]).rpartition("/")[2]
