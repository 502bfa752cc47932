"""Pipelines whose trainings are jobs: of two at once, and under PodSecurity `restricted`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl, kubernetes
from kubernetes import client

from kfp_ddp.components.train.component import train
from kfp_ddp.pipelines.compiled import built_in, write
from kfp_ddp.plan.form import EVALUATE_REQUESTS, SYNC_REQUESTS
from tests.e2e.harness import bucket, workflow
from tests.e2e.harness.grounds import IMAGE, Grounds, until
from tests.e2e.harness.leftovers import claims, leftovers
from tests.e2e.harness.namespace import DATA, WORK
from tests.e2e.harness.play import Run
from tests.e2e.harness.programs import kubectl
from tests.e2e.harness.rights import DEPLOY
from tests.e2e.harness.scene import COMPILED, Scene, make_scene
from tests.e2e.harness.training import LOOP, TRAINING, WORKERS
from tests.e2e.harness.trainings import compiled, sync_only

RATES = {"train": 0.1, "train-2": 0.001}
QUOTA = {
    "requests.cpu": "1800m",
    "limits.cpu": "16",
    "requests.memory": "8Gi",
    "limits.memory": "24Gi",
}
STEPS = dict[str, Any](
    sync_cpu="1500m", sync_memory="512Mi", evaluate_cpu="1500m", evaluate_memory="2Gi"
)


DESTINATION = f"gs://{bucket.MODELS}/trainjob"


@dataclass(frozen=True)
class Trained:
    """A run that trained and evaluated as TrainJobs of two pods."""

    run: Run
    workers: list[Any]
    """The pods of its training while both of them ran."""
    before: set[str]
    """The claims before it."""

    @property
    def published(self) -> str:
        """The claim of its dataset."""
        return str(self.run.steps["dataset-volume"].outputs["claim"])


@pytest.fixture(scope="module")
def trained(scene: Scene, bucket_url: str) -> Trained:
    before = claims(scene.grounds)
    evaluation = {"evaluate_backend": "trainjob", "evaluate_nodes": 2, "evaluate_cpu": "1"}
    run = scene.run(
        **TRAINING | {"destination": DESTINATION, "sync": {"dataset": "s", "publish": "snapshot"}},
        backend="trainjob",
        nodes=2,
        job={**WORKERS, **evaluation, "nproc_per_node": 1},
    ).start()
    pods = until(lambda: _workers(scene, run) or run.succeeded is not None, "two workers", 300)
    assert isinstance(pods, list), run.explain()
    run.wait()
    assert run.succeeded, run.explain()
    return Trained(run, pods, before)


@pytest.mark.smoke
def test_two_workers_over_the_pod_network(scene: Scene, bucket_url: str, trained: Trained) -> None:
    run = trained.run
    assert _modes(scene, trained.published) == ["ReadOnlyMany"]
    for pod in trained.workers:
        assert _mounts(pod) == {"/data": (trained.published, True), "/work": (WORK, None)}
    log = run.steps["train"].log
    for rank in (0, 1):
        assert f"rank {rank} of 2 on" in log, log
    assert "created TrainJob" in run.steps["evaluate"].log, run.steps["evaluate"].log
    assert any(n.startswith("trainjob/") for n in bucket.names(bucket_url, bucket.MODELS))
    assert claims(scene.grounds) == trained.before | {trained.published}


def test_two_workers_evaluate_as_one_process(
    scene: Scene, local_run: Run, trained: Trained
) -> None:
    evaluated = _last_evaluation(scene, trained.run)
    assert evaluated == pytest.approx(_last_evaluation(scene, local_run))


@pytest.mark.smoke
def test_two_workers_predict_and_nothing_of_the_runs_is_left(
    scene: Scene, bucket_url: str, trained: Trained
) -> None:
    predicted = scene.run(
        COMPILED.with_name("batch_predict.yaml"),
        source=TRAINING["source"],
        bundle=f"{DESTINATION}/digits",
        table=f"{DESTINATION}.csv",
        backend="trainjob",
        job={**WORKERS, "nodes": 2, "nproc_per_node": 1},
    ).play()
    assert predicted.succeeded, predicted.explain()
    assert predicted.steps["predict"].outputs["rows"] == 10 * (bucket.TRAIN + bucket.VAL)
    assert "trainjob.csv" in bucket.names(bucket_url, bucket.MODELS)

    for one in (trained.run, predicted):
        _delete_run(scene, one)
    # The published claim keeps the snapshot that it came from.
    ours = f"volumesnapshots/{trained.published}"
    until(lambda: leftovers(scene.grounds) <= {ours}, "the end of what the run owns")


def _workers(scene: Scene, run: Run) -> list[Any] | None:
    """Return the job's pods once two of them run."""
    running = [pod for pod in scene.grounds.workers(run.id) if pod.status.phase == "Running"]
    return running if len(running) == 2 else None


def _modes(scene: Scene, claim: str) -> list[str]:
    space = scene.grounds.namespace
    result = scene.grounds.core.read_namespaced_persistent_volume_claim(claim, space)
    modes: list[str] = result.spec.access_modes
    return modes


def _mounts(pod: Any) -> dict[str, tuple[str, bool | None]]:
    """Claim and read-only flag by mount path."""
    claims = {
        volume.name: volume.persistent_volume_claim.claim_name
        for volume in pod.spec.volumes
        if volume.persistent_volume_claim
    }
    return {
        mount.mount_path: (claims[mount.name], mount.read_only)
        for mount in pod.spec.containers[0].volume_mounts
        if mount.name in claims
    }


def _last_evaluation(scene: Scene, run: Run) -> tuple[int, float, float]:
    last = [event for event in scene.events(run) if event["event"] == "eval"][-1]
    return last["step"], last["loss"], last["accuracy"]


def _delete_run(scene: Scene, run: Run) -> None:
    """What KFP does when a run is deleted: its Workflow goes, and the cluster collects the rest."""
    scene.grounds.custom.delete_namespaced_custom_object(
        workflow.GROUP,
        workflow.VERSION,
        scene.grounds.namespace,
        workflow.PLURAL,
        run.workflow["metadata"]["name"],
        propagation_policy="Background",
    )


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


@dataclass(frozen=True)
class Seen:
    """A finished run, and its pods."""

    scene: Scene
    run: Run
    evicted: dict[str, int]
    """HTTP status of an eviction, by step."""
    resources: dict[str, Any]
    """Resources of the main container, by step."""


@pytest.fixture(scope="module")
def seen(
    cluster: client.ApiClient, bucket_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("strict")
    environment = {"STORAGE_EMULATOR_HOST": bucket_url}
    with make_scene(cluster, folder, environment, strict=QUOTA) as scene:
        kubectl("apply", "-n", scene.grounds.namespace, "-k", str(DEPLOY / "eviction"))
        arguments = TRAINING | {"nodes": 2, "job": {**WORKERS, "nproc_per_node": 1, **STEPS}}
        document = folder / "compiled" / COMPILED.name
        write(built_in((COMPILED.stem,)), document.parent, restricted=True)
        run = scene.run(document, **arguments, backend="pytorchjob").start()
        evicted = {name: _evict(scene.grounds, run, name) for name in ("data-sync", "train")}
        run.wait()
        pods = {name: _pod(scene.grounds, step.pod) for name, step in run.steps.items()}
        resources = {n: pod.spec.containers[0].resources for n, pod in pods.items() if pod}
        yield Seen(scene, run, evicted, resources)


@pytest.mark.smoke
def test_run_succeeds(seen: Seen) -> None:
    assert seen.run.succeeded, seen.run.explain()
    assert "publish" in seen.run.steps
    assert "rank 1 of 2 on" in seen.run.steps["train"].log
    message = "pytorchjob of 2 pods, no GPU each, at most 4 cpu and 4Gi memory"
    assert message in seen.run.steps["preflight"].log, "default resources of workers"


@pytest.mark.smoke
def test_quota_and_level_are_enforced(seen: Seen) -> None:
    refused = {
        "failed quota": {"name": "a", "image": IMAGE, "securityContext": _non_root()},
        "violates PodSecurity": {"name": "a", "image": IMAGE},
    }
    for why, container in refused.items():
        body = {"metadata": {"name": "b"}, "spec": {"containers": [container]}}
        with pytest.raises(client.ApiException) as raised:
            seen.scene.grounds.core.create_namespaced_pod(
                seen.scene.grounds.namespace, body, dry_run="All"
            )
        assert why in raised.value.body


@pytest.mark.smoke
def test_steps_have_the_resources_of_the_settings(seen: Seen) -> None:
    launcher, evaluate = {"cpu": "500m", "memory": "1Gi"}, {"cpu": "1500m", "memory": "2Gi"}
    expected = {
        "data-sync": ({"cpu": "1500m", "memory": "512Mi"}, SYNC_REQUESTS),
        "train": (launcher, launcher),
        "evaluate": (evaluate, EVALUATE_REQUESTS),
        "export": (evaluate, EVALUATE_REQUESTS),
    }
    for name, (limits, asks) in expected.items():
        result = seen.resources[name]
        assert (result.limits, result.requests) == (limits, asks), name


@pytest.mark.smoke
def test_long_step_is_not_evicted(seen: Seen) -> None:
    """A drain gets Too Many Requests, and waits."""
    assert seen.evicted == {"data-sync": 429, "train": 429}
    assert {len(step.attempts) for step in seen.run.steps.values()} == {1}


def _evict(grounds: Grounds, run: Run, step: str) -> int:
    """Evict the running pod of a step; return the HTTP status."""

    def running() -> bool:
        assert run.succeeded is None, run.explain()
        pod = _pod(grounds, run.steps[step].pod) if step in run.steps else None
        return bool(pod and pod.status.phase == "Running")

    until(running, f"{step} runs", 240)
    name = run.steps[step].pod
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}

    def answer() -> int:
        try:
            grounds.core.create_namespaced_pod_eviction(name, grounds.namespace, body)
        except client.ApiException as error:
            return int(error.status)
        return 201

    return answer()


def _pod(grounds: Grounds, name: str) -> Any:
    try:
        return grounds.core.read_namespaced_pod(name, grounds.namespace)
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise


def _non_root() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
