"""`kfp_ddp.Client`: the same requests as the commands, typed results, functions as jobs."""

import base64
import html
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp import Client
from kfp_ddp.client.run import follow
from kfp_ddp.core.errors import InputError, JobError, RunCancelledError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.local import run_script
from kfp_ddp.k8s.api import LAUNCHER
from kfp_ddp.storage.kinds import open_store
from tests.commands import call
from tests.exports import exported
from tests.kfp_server.server import KfpServer
from tests.pages import ROOT, fences
from tests.schedules import uploaded

pytestmark = pytest.mark.usefixtures("configured")
FLOWERS = "gs://bucket/flowers"


def test_the_package_imports_no_client() -> None:
    probe = "import sys, kfp_ddp; print([m for m in sys.modules if m.startswith('kfp_ddp.')])"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "[]\n"


@pytest.fixture
def page(kfp_server: KfpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names in the Python of the page, after it has run."""

    def end(_: float) -> None:
        kfp_server.put_run(next(iter(kfp_server.store.runs)), "SUCCEEDED", {"train": "SUCCEEDED"})

    text = "\n".join(fences(ROOT / "docs" / "python.md", "python"))
    assert text.count("http://localhost:8888") == 1
    file = tmp_path / "page.py"
    file.write_text(text.replace("http://localhost:8888", kfp_server.url))
    with monkeypatch.context() as patches:
        patches.setattr(follow, "sleep", end)
        return runpy.run_path(str(file))


def test_the_page_works_as_written(page: dict[str, Any]) -> None:
    assert page["run"].info.state == "SUCCEEDED"
    assert page["job"].status == "PENDING"
    assert page["divided"].status == "PENDING"
    assert page["nightly"]["state"] == "enabled"


def test_a_run_is_that_of_the_command(kfp_server: KfpServer) -> None:
    more: dict[str, Any] = {"training.seed": 7}
    Client().run(FLOWERS, name="a", gpus_per_node=2, epochs=30, **more)
    words = ("--name", "a", "--gpus", 2, "--set", "epochs=30", "--set", "seed=7")
    assert call("run", FLOWERS, *words).exit_code == 0
    ours, theirs = (request.body for request in kfp_server.requests_for("create_run"))
    assert ours == theirs


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (lambda: Client(hots="x"), "hots"),
        (lambda: Client().run(FLOWERS, epochs="many"), "epochs"),
        (lambda: Client().run(FLOWERS, epoch=3), "epoch"),
        (lambda: Client().run("photos"), "folder that does not exist"),
        (lambda: Client().run("https://me:secret@example.com/x"), "login"),
        (lambda: Client().run_local("photos", replace=True), "--output"),
        (lambda: Client().models("flowers"), "destination"),
    ],
)
def test_what_is_wrong_is_refused_before_it_is_sent(
    start: Callable[[], object], says: str, kfp_server: KfpServer
) -> None:
    with pytest.raises(InputError, match=says):
        start()
    assert not kfp_server.store.runs


def test_a_run_is_followed_cancelled_and_retried(
    kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = Client(namespace="kubeflow")
    run = client.run(FLOWERS, name="<b>flowers</b>")
    assert [one.id for one in client.runs(state="pending")] == [run.id]
    monkeypatch.setattr(follow, "sleep", lambda _: None)
    with pytest.raises(TimeoutError, match="PENDING"):
        run.wait(timeout=0)
    assert run.cancel().info.state == "CANCELING"
    kfp_server.put_run(run.id, "FAILED", {"preflight": "SUCCEEDED", "train": "FAILED"})
    found = client.get_run("last")
    with pytest.raises(RunCancelledError, match="describe"):
        found.wait()
    with pytest.raises(InputError, match="already over"):
        found.cancel()
    assert found.describe(files=False).step == "train"
    shown = found._repr_html_()
    assert "data-sync" in shown
    assert "<b>" not in html.unescape(shown)
    assert shown.count('"') == 6  # of three attributes: the page is escaped
    assert found.retry().status == "RUNNING"
    with client, pytest.raises(InputError, match="no run"):
        client.get_run("other")
    assert client.get_run(found).status == "RUNNING"  # connected again
    with pytest.raises(InputError, match="no run"):
        client.get_run(tmp_path)


def test_schedules(kfp_server: KfpServer) -> None:
    uploaded(kfp_server)
    schedules = Client().schedules
    new = schedules.create("nightly", cron="0 3 * * *", pipeline="own", rounds=3, latest=True)
    assert (new["parameters"], new["state"], new["notes"]) == ({"rounds": 3}, "enabled", [])
    changed = schedules.replace("nightly", rate=0.5, max_concurrency=2)
    assert (changed["parameters"], changed["remaining"]) == ({"rounds": 3, "rate": 0.5}, [])
    run = schedules.run_now("nightly")
    assert run.info.parameters == {"rounds": 3, "rate": 0.5}
    with pytest.raises(InputError, match="--force"):
        schedules.delete("nightly", wait=True, force=True)
    assert schedules.delete("nightly", force=True)["deleted"] == changed["id"]


def test_a_model_is_promoted(tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    where = open_store(str(tmp_path / "exports"))
    version = exported(where, "flowers", tmp_path / "run", 9, Lineage())
    model = Client(destination=where.uri).models("flowers")
    assert model.promote(version[:8]) == (version, "")
    assert [(one.version, one.champion) for one in model.versions()] == [(version, True)]


def data_parallel(lr: float) -> None:
    import torch

    model = torch.nn.DataParallel(torch.nn.Linear(4, 2))
    model(torch.randn(8, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=lr).step()


def distributed(lr: float, fails: bool = False) -> None:
    import os

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    data = TensorDataset(torch.randn(32, 4))
    for (features,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        model(features).sum().backward()
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "local", os.environ["LOCAL_RANK"])
    if fails and dist.get_rank() == 1:
        raise ValueError("no more data")
    dist.destroy_process_group()


def test_a_function_is_a_job(kfp_server: KfpServer) -> None:
    # The fields of the Kubeflow SDK, with its defaults.
    trainer = SimpleNamespace(
        func=distributed,
        func_args={"lr": 0.5},
        image=None,
        packages_to_install=None,
        pip_index_urls=["https://pypi.org/simple"],
        num_nodes=3,
        resources_per_node={"cpu": 5, "Memory": "8Gi", "gpu": 2},
        env={"A": "b"},
    )
    runtime = SimpleNamespace(name="torch-distributed")
    run = Client().train(trainer=trainer, runtime=runtime, shm_size="1Gi")
    assert run.info.name.startswith("distributed-")
    (request,) = kfp_server.requests_for("create_run")
    spec = request.body["pipeline_spec"]
    root = spec.get("pipeline_spec", spec)["root"]
    assert root["inputDefinitions"]["parameters"]["backend"]["defaultValue"] == "trainjob"
    platform = spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    (token,) = platform["exec-job"]["secretAsVolume"]
    assert token["secretNameParameter"]["runtimeValue"]["constant"] == LAUNCHER
    (task,) = root["dag"]["tasks"].values()
    values = (task["inputs"]["parameters"][n] for n in ("nodes", "script", "settings"))
    nodes, script, settings = (one["runtimeValue"]["constant"] for one in values)
    assert nodes == 3
    script = base64.b64decode(script.partition(",")[2]).decode()
    assert "def distributed(lr" in script
    assert '{"lr": 0.5}' in script
    limits = {"cpu": "5", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert settings == {
        "env": {"A": "b"},
        "resources": {"limits": limits, "requests": limits},
        "runtime": "torch-distributed",
        "shm_size": "1Gi",
    }


def test_a_trainer_may_have_an_image_in_place_of_a_function(kfp_server: KfpServer) -> None:
    trainer = SimpleNamespace(  # the fields of a CustomTrainerContainer
        image="ghcr.io/you/trainer:1.0", num_nodes=2, resources_per_node={"gpu": 1}, env=None
    )
    run = Client().train(trainer=trainer, runtime="torch-distributed")
    assert run.info.name.startswith("job-")
    inputs = inputs_of_the_job(kfp_server)
    assert (inputs["image"], inputs["nodes"]) == ("ghcr.io/you/trainer:1.0", 2)
    assert "script" not in inputs
    assert "command" not in inputs


@pytest.mark.parametrize(("func", "ranks"), [(data_parallel, 1), (distributed, None)])
def test_a_function_with_dataparallel_is_one_process_of_a_pod(
    func: Any, ranks: int | None, kfp_server: KfpServer
) -> None:
    Client().train(func, func_args={"lr": 0.1}, resources_per_node={"gpu": 4})
    settings = inputs_of_the_job(kfp_server)["settings"]
    assert settings["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert settings.get("nproc_per_node") == ranks


def inputs_of_the_job(kfp_server: KfpServer) -> dict[str, Any]:
    """The inputs that the step of the only run was sent."""
    (request,) = kfp_server.requests_for("create_run")
    spec = request.body["pipeline_spec"]
    (task,) = spec.get("pipeline_spec", spec)["root"]["dag"]["tasks"].values()
    values = task["inputs"]["parameters"].items()
    constants = {name: value.get("runtimeValue", {}) for name, value in values}
    return {name: value["constant"] for name, value in constants.items() if value}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"func": distributed}, "missing a required argument: 'lr'"),
        ({}, "no function"),
        ({"image": "a:1"}, "no function"),
        ({"trainer": SimpleNamespace(image="a:1", func_args={"lr": 1})}, "func_args"),
        ({"func": data_parallel, "func_args": {"lr": 1}, "packages_to_install": ["timm"]}, "pin"),
        ({"func": data_parallel, "func_args": {"lr": 1}, "num_node": 2}, "num_node"),
        ({"func": data_parallel, "func_args": [1]}, "func_args"),
        ({"func": data_parallel, "num_nodes": 2, "nodes": 3}, "one setting"),
        ({"func": distributed, "trainer": SimpleNamespace(func=distributed)}, "an argument, too"),
        ({"trainer": SimpleNamespace(func=distributed, steps=3)}, "steps .* not known"),
        *(
            ({"func": data_parallel, "func_args": {"lr": 1}, **secret}, "env_from_secrets")
            for secret in (
                {"env": {"HF_TOKEN": "a"}},
                {"env": {"A": "https://me:hunter2@h"}},
                {"env_vars": [{"name": "WANDB_API_KEY", "value": "a"}]},
                {"func_args": {"lr": "https://h/x?sig=a"}},
                {"image": "me:hunter2@registry/a"},
                {"args": ["--token", "a"]},
                {"code": "gs://me:hunter2@b/x"},
                {"pip_index_urls": ["https://me:hunter2@h/simple"]},
                {"packages_to_install": ["a==1.0 @ https://me:hunter2@h/a.whl"]},
            )
        ),
    ],
)
def test_an_invalid_job_is_refused(
    arguments: dict[str, Any], says: str, kfp_server: KfpServer
) -> None:
    with pytest.raises(InputError, match=says):
        Client().train(**arguments)
    assert not kfp_server.store.runs


@pytest.mark.slow
def test_weights_divided_among_the_ranks_are_resumed(page: dict[str, Any], tmp_path: Path) -> None:
    shown = re.compile(r"rank (\d) has (\d+) of (\d+) weights; resumed from step (\d+)")
    for steps, first, ranks in ((2, 0, 1), (3, 2, 2)):
        run = Client().train(
            page["train_divided"],
            func_args={"folder": str(tmp_path / "work"), "steps": steps},
            kind="local",
            num_nodes=ranks,
            output=tmp_path / f"output-{steps}",
        )
        assert run.status == "SUCCEEDED"
        lines = shown.findall("\n".join(run.logs("job")))
        own = {int(rank): int(weights) for rank, weights, _, _ in lines}
        assert own.keys() == set(range(ranks))
        assert {int(step) for *_, step in lines} == {first}
        assert {int(total) for _, _, total, _ in lines} == {sum(own.values())}
        assert max(own.values()) < 1.2 * sum(own.values()) / ranks


@pytest.mark.slow
def test_functions_run_on_this_machine(tmp_path: Path) -> None:
    client, more = Client(), dict[str, Any](kind="local", num_nodes=2)
    run = client.train(data_parallel, func_args={"lr": 0.1}, kind="local", output=tmp_path / "a")
    assert run.status == "SUCCEEDED"
    assert "job" in run._repr_html_()
    with pytest.raises(JobError, match="rank 1: ValueError: no more data"):
        client.train(distributed, func_args={"lr": 1, "fails": True}, output=tmp_path / "b", **more)
    run = client.get_run(tmp_path / "b")
    assert run.describe().step == "job"
    lines = {line.partition(":")[2] for line in run.logs("job") if "rank " in line and "of" in line}
    assert lines == {"rank 0 of 2 local 0", "rank 1 of 2 local 1"}


def test_a_package_that_this_python_lacks_is_named(tmp_path: Path) -> None:
    absent = LaunchSpec.create(image="a:1", script="pass", packages_to_install=["absent-kfp==1.0"])
    with pytest.raises(InputError, match="lacks absent-kfp"):
        run_script(absent, tmp_path)
