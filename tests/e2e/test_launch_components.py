"""The component `job`, of each kind, as a step of a pipeline: a command, a file, a folder."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl, kubernetes
from kubernetes import client

from kfp_ddp.components.job.component import job
from kfp_ddp.jobs.shipping.authoring import as_folder, as_function
from tests.e2e.harness import rights
from tests.e2e.harness.admission import provide_kubectl, skip_without_mpi
from tests.e2e.harness.gpus import GPU, advertise_gpus
from tests.e2e.harness.grounds import IMAGE, UID
from tests.e2e.harness.namespace import WORK
from tests.e2e.harness.play import Run
from tests.e2e.harness.scene import Scene, make_scene
from tests.e2e.harness.trainings import compiled
from tests.package_index import index
from tests.serving import Files, serving

# The title of each of two workers' log lines; an MPIJob's ranks write through its launcher.
SPEAKERS = {
    "pytorchjob": {"worker-0", "worker-1"},
    "trainjob": {"node-0", "node-1"},
    "tfjob": {"chief-0", "worker-0"},
    "mpijob": {"launcher-0"},
    "xgboostjob": {"master-0", "worker-0"},
}
# A job is over with its first pod, so no pod leaves before both are there.
MEET = """
import os, time
from pathlib import Path
place = Path("/work", os.environ["PLACE"])
place.mkdir(exist_ok=True)
(place / os.environ["HOSTNAME"]).touch()
while len(list(place.iterdir())) < 2:
    time.sleep(0.1)
"""
SAY = f"""{MEET}
import json
names = ("A", "TOKEN", "PET_NPROC_PER_NODE", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG")
said = {{name: os.environ[name] for name in names if name in os.environ}}
print("SAID", json.dumps(said | {{"host": os.environ["HOSTNAME"]}}), flush=True)
"""


@pytest.fixture(scope="module")
def stock(cluster: client.ApiClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A namespace with KFP's stock rights, which may not create ConfigMaps, and TrainJobs."""
    folder = tmp_path_factory.mktemp("stock")
    with make_scene(cluster, folder, {}, ours=False) as staging:
        jobs = {"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["*"]}
        rights.bind(cluster, staging.grounds.namespace, "trainjobs", [jobs])
        with provide_kubectl(staging.grounds):
            yield staging


@pytest.fixture(scope="module")
def full(cluster: client.ApiClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A namespace with the rights in deploy/."""
    with (
        make_scene(cluster, tmp_path_factory.mktemp("full"), {}) as staging,
        provide_kubectl(staging.grounds),
    ):
        yield staging


@pytest.mark.parametrize("kind", list(SPEAKERS))
def test_task_settings(full: Scene, tmp_path: Path, cluster: client.ApiClient, kind: str) -> None:
    """The node has GPUs for the workers alone: a step or a launcher that took one would wait."""
    if kind == "mpijob":
        skip_without_mpi()
    node = full.grounds.core.list_node().items[0].metadata.labels["kubernetes.io/hostname"]
    secret = {"metadata": {"name": f"token-{kind}"}, "stringData": {"key": "s3cr$t"}}
    full.grounds.core.create_namespaced_secret(full.grounds.namespace, secret)

    @dsl.pipeline(name=f"own-command-{kind}")  # type: ignore[untyped-decorator]
    def pipeline(work_claim: str) -> None:
        start = ["mpirun"] if kind == "mpijob" else []
        task = _task(
            kind,
            command=[*start, "python3", "-c", SAY],
            env={"PLACE": kind},
            node_selector={"kubernetes.io/hostname": node},
        )
        task.set_accelerator_type(GPU).set_accelerator_limit(2)
        task.set_cpu_request("20m").set_memory_limit("2G").set_env_variable("A", "b")
        kubernetes.mount_pvc(task, pvc_name=work_claim, mount_path="/work")
        kubernetes.add_toleration(task, key="gpu", operator="Exists", effect="NoSchedule")
        kubernetes.add_node_selector(task, "kubernetes.io/os", "linux")
        kubernetes.use_secret_as_env(
            task, secret_name=f"token-{kind}", secret_key_to_env={"key": "TOKEN"}
        )

    with advertise_gpus(cluster, 4):
        run = full.run(compiled(pipeline, tmp_path), work_claim=WORK).play()

    assert run.succeeded, run.explain()
    pods = full.grounds.workers(run.id)
    workers = [pod for pod in pods if "launcher" not in pod.metadata.name]
    assert len(workers) == 2
    for pod in workers:
        assert pod.spec.containers[0].resources.limits[GPU] == "2"
        assert pod.spec.containers[0].resources.limits["memory"] == "2G"
        assert pod.spec.node_selector == {
            "kubernetes.io/os": "linux",
            "kubernetes.io/hostname": node,
        }
        assert "gpu" in [toleration.key for toleration in pod.spec.tolerations]
    for pod in (*(p for p in pods if p not in workers), _step(full, run)):
        assert GPU not in (pod.spec.containers[0].resources.limits or {})
    line = _said(run, "SAID")
    assert {who for who, _ in line} == SPEAKERS[kind]
    result = [json.loads(text) for _, text in line]
    assert {item["host"] for item in result} == {pod.metadata.name for pod in workers} or (
        kind == "trainjob" and len({item["host"] for item in result}) == 2
    )
    for item in result:
        assert (item["A"], item["TOKEN"]) == ("b", "s3cr$t")
        assert full.work.read(f"{kind}/{item['host']}") == b""
    if kind in ("pytorchjob", "trainjob"):
        assert {item["PET_NPROC_PER_NODE"] for item in result} == {"2"}  # one for each GPU
    if kind == "mpijob":
        assert [item["OMPI_COMM_WORLD_SIZE"] for item in result] == ["4"] * 4
    if kind == "tfjob":
        roles = {json.loads(item["TF_CONFIG"])["task"]["type"] for item in result}
        assert roles == {"chief", "worker"}
    ended = json.loads(run.artifact("job", "job_object"))
    assert ended["metadata"]["name"] == run.steps["job"].outputs["Output"]


def adding_up(start: int, text: str) -> None:
    """Two ranks of gloo, with a package that their image lacks."""
    import kfpddp_one  # type: ignore[import-not-found]
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    print("SUM", int(total), ascii(text), kfpddp_one.SAY, flush=True)
    dist.destroy_process_group()


def boosting(rows: int) -> None:
    """A tree of two ranks, each of which has half of the rows, by XGBoost's own tracker."""
    import os

    import numpy as np
    import xgboost
    from xgboost import collective
    from xgboost.tracker import RabitTracker

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    world = int(os.environ["WORLD_SIZE"])
    if rank == 0:
        tracker = RabitTracker(host_ip="0.0.0.0", n_workers=world, port=port)
        tracker.start()
    tracked_at = os.environ["MASTER_ADDR"]
    with collective.CommunicatorContext(dmlc_tracker_uri=tracked_at, dmlc_tracker_port=port):
        total = int(collective.allreduce(np.array([rank + 1]), collective.Op.SUM)[0])
        mine = np.arange(rank, rows, world, dtype=float)
        data = xgboost.DMatrix(mine[:, None], mine >= rows / 2)
        settings = {"objective": "binary:logistic", "nthread": 1}
        booster = xgboost.train(settings, data, num_boost_round=4)
        everything = np.arange(rows, dtype=float)
        correct = (booster.predict(xgboost.DMatrix(everything[:, None])) > 0.5) == (
            everything >= rows / 2
        )
        print("TREE", total, bool(correct.all()), flush=True)
    if rank == 0:
        tracker.wait_for()


def test_xgboost_trains_over_the_pods_of_an_xgboostjob(stock: Scene, tmp_path: Path) -> None:
    @dsl.pipeline(name="own-xgboost")  # type: ignore[untyped-decorator]
    def pipeline() -> None:
        _task(
            "xgboostjob",
            **as_function(boosting, {"rows": 64}),
            packages_to_install=[f"xgboost-cpu=={version('xgboost-cpu')}"],
            cpu_request="20m",
        )

    run = stock.run(compiled(pipeline, tmp_path)).play()
    assert run.succeeded, run.explain()
    said = _said(run, "TREE")
    assert {who for who, _ in said} == SPEAKERS["xgboostjob"]
    assert {text for _, text in said} == {"3 True"}


HARD = "$$ $(A) ${local_rank} `id` ∑ \n{{x}}"


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_a_function_runs_with_a_package(stock: Scene, tmp_path: Path, kind: str) -> None:
    index(tmp_path)
    with _served(tmp_path) as port:

        @dsl.pipeline(name=f"own-function-{kind}")  # type: ignore[untyped-decorator]
        def pipeline() -> None:
            _task(
                kind,
                **as_function(adding_up, {"start": 20, "text": HARD}),
                env={"A": "expanded", "PIP_TRUSTED_HOST": HOST},
                packages_to_install=["kfpddp-one==1.0"],
                pip_index_urls=[f"http://{HOST}:{port}/simple"],
                cpu_request="20m",
            )

        run = stock.run(compiled(pipeline, tmp_path)).play()

    assert run.succeeded, run.explain()
    assert _said(run, "SUM") == [(who, f"41 {HARD!a} one 1.0") for who, _ in _said(run, "SUM")]
    assert {who for who, _ in _said(run, "SUM")} == SPEAKERS[kind]


@pytest.mark.parametrize("kind", list(SPEAKERS))
def test_a_folder_runs_in_two_workers(stock: Scene, tmp_path: Path, kind: str) -> None:
    if kind == "mpijob":
        skip_without_mpi()
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "train.py").write_text(
        f"{MEET}\nimport sys, aside\n"
        "print('RAN', __name__, ascii(sys.argv[1:] + [aside.HELD]), flush=True)\n"
    )
    (folder / "aside.py").write_text(f"HELD = {HARD!r}\n")
    args = ["--", HARD, "", "a b"]

    @dsl.pipeline(name=f"own-folder-{kind}")  # type: ignore[untyped-decorator]
    def pipeline() -> None:
        env = {"A": "expanded", "PLACE": f"folder-{kind}"}
        claims = {"/work": WORK}
        task = as_folder(folder, "pkg.train", args)
        _task(kind, **task, env=env, claims=claims, cpu_request="20m")

    run = stock.run(compiled(pipeline, tmp_path)).play()

    assert run.succeeded, run.explain()
    line = _said(run, "RAN")
    assert {text for _, text in line} == {f"__main__ {[*args, HARD]!a}"}
    assert len(line) == 2
    assert {who for who, _ in line} == SPEAKERS[kind]


HOST = "10.99.0.1"  # what pods reach of the machine that runs the tests


@contextmanager
def _served(folder: Path) -> Iterator[int]:
    """Yield the port of a server of the files in a folder."""
    server = ThreadingHTTPServer(("0.0.0.0", 0), partial(Files, directory=str(folder)))
    with serving(server):
        yield server.server_port


def _task(kind: str, command: list[str] | None = None, script: str = "", **settings: Any) -> Any:
    inputs = {name: settings.pop(name) for name in ("args", "code", "entry") if name in settings}
    fields = {"run_as_user": UID, "shm_size": "64Mi", "grace_seconds": 5, **settings}
    if kind != "trainjob":
        fields["clean_pod_policy"] = "None"
    return job(
        run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        task_name=dsl.PIPELINE_TASK_NAME_PLACEHOLDER,
        task_id=dsl.PIPELINE_TASK_ID_PLACEHOLDER,
        kind=kind,
        image=IMAGE,
        command=command or [],
        script=script,
        **inputs,
        nodes=2,
        settings=fields,
    ).set_caching_options(False)


def _said(run: Run, mark: str) -> list[tuple[str, str]]:
    """Who wrote each line that begins with `mark`, and what follows it."""
    (step,) = run.steps.values()
    return re.findall(rf"^\[([\w-]+)\] {mark} (.*)$", step.log, re.MULTILINE)


def _step(scene: Scene, run: Run) -> Any:
    (step,) = run.steps.values()
    return scene.grounds.core.read_namespaced_pod(step.pod, scene.grounds.namespace)
