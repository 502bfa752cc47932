"""Jobs whose step is evicted, lost or killed, and two recurring runs with one champion."""

import re
from pathlib import Path

import pytest
from kfp import compiler, dsl, kubernetes
from kubernetes import client

from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate
from kfp_ddp.components.publish.component import publish
from kfp_ddp.jobs.kinds import KINDS
from tests.e2e.harness.grounds import IMAGE, until
from tests.e2e.harness.launch_step import LaunchStep, python
from tests.e2e.harness.namespace import WORK
from tests.e2e.harness.play import LOST_PODS, Run
from tests.e2e.harness.running import evict
from tests.e2e.harness.scene import Scene, make_scene
from tests.e2e.harness.trainings import Begin, attempts, log, starts, workers

EXPORTS = "models/squares"


@pytest.mark.smoke
def test_an_evicted_launcher_reports_the_step_of_a_retry(scene: Scene, begin: Begin) -> None:
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
    line = re.search(r"launcher was evicted; Retry resumes from step (\d+) or later", log(run))
    assert line is not None, run.explain()
    assert step.attempts[0].error == f"main: Error (exit code 143): {line[0]}"
    assert run.steps["teardown"].succeeded, run.explain()
    until(lambda: not workers(scene, run), "the last checkpoint of the ranks", 180)
    stopped = scene.events(run)[-1]
    assert (stopped["event"], stopped["status"]) == ("end", "preempted")
    assert int(line[1]) > 0
    assert stopped["step"] >= int(line[1])

    again = run.retried().play()
    assert again.succeeded, again.explain()
    assert starts(scene, run)[-1]["resumed_from_step"] == stopped["step"]
    assert scene.events(run)[-1]["status"] == "done"


def runs(run: Run) -> int:
    return log(run).count(" is running")


def over(run: Run) -> bool:
    return run.steps["train"].succeeded is not None


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
def test_the_job_of_a_lost_step_is_deleted(scene: Scene, begin: Begin, backend: str) -> None:
    """Its pod is lost more often than Argo retries it."""
    sleep = {"kind": backend, **python("import time; print('here'); time.sleep(900)")}
    other = LaunchStep(scene.grounds, sleep).start()
    run = begin(epochs=4000, backend=backend, nodes=1)
    other.saw("here")
    before = other.jobs(backend)
    for lost in range(LOST_PODS + 1):
        until(lambda lost=lost: attempts(run) > lost, "the step")  # type: ignore[misc]
        until(lambda lost=lost: over(run) or runs(run) > lost, "the job")  # type: ignore[misc]
        assert not over(run), run.explain()
        scene.grounds.core.delete_namespaced_pod(
            run.steps["train"].pod, scene.grounds.namespace, grace_period_seconds=0
        )
    remaining = scene.grounds.jobs(run.id, backend)
    run.wait()
    after = other.jobs(backend)
    other.terminate()

    assert {name: step.succeeded for name, step in run.steps.items()} == {
        "train": False,
        "teardown": True,
    }
    (job,) = remaining
    line = f"deleted {KINDS[backend].title} {job['metadata']['name']}"
    assert line in run.steps["teardown"].log, run.explain()
    assert run.steps["teardown"].outputs["Output"] == line
    assert scene.grounds.jobs(run.id, backend) == []
    until(lambda: not workers(scene, run), "the end of the workers")
    assert [job["metadata"]["uid"] for job in after] == [before[0]["metadata"]["uid"]]
    assert "deletionTimestamp" not in after[0]["metadata"]
    assert other.wait() == "Failed"


@dsl.component(base_image=IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def prepare(run_dir: str, data: str, seed: int) -> str:
    """Write the outputs of a train step: a network of this seed, and images."""
    from pathlib import Path

    import torch
    from PIL import Image

    from kfp_ddp.training.model.networks import build
    from kfp_ddp.training.spec.config import TrainConfig
    from kfp_ddp.training.state import checkpoint

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
        checkpoint=trained.output, run_dir=run_dir, dataset_path=data, champion=f"/work/{EXPORTS}"
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
        rules={"min_accuracy": 0.0, "min_improvement": -1.0},
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
