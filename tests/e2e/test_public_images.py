"""Pipelines in public images: with our source from a ConfigMap, and packages from an index."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp import compiler, components, dsl, kubernetes
from kubernetes import client

from kfp_ddp.core.container_images import Images
from kfp_ddp.jobs.shipping.own_package import map_name
from tests.conftest import CHECKOUT
from tests.e2e.harness.bucket import serving_index
from tests.e2e.harness.grounds import until
from tests.e2e.harness.programs import kfp_ddp
from tests.e2e.harness.scene import COMPILED, Scene, make_scene
from tests.e2e.harness.training import TRAINING
from tests.e2e.test_images import CLUSTER

IN_PODS = Path("/opt/kf/checkout")
"""The checkout in containers of such images; claims may hide its own path."""
INDEX = CHECKOUT / "build" / "index"
PUBLIC = Images("e2e.local/library/python:3.12-slim", "e2e.local/pytorch/pytorch:2-runtime")
"""Mirrors of the public images: an environment with nothing but pip, and one with torch, too."""
QUOTA = {"limits.cpu": "32", "limits.memory": "64Gi"}


@pytest.fixture(scope="module")
def images() -> Images:
    if not INDEX.exists():
        pytest.skip(f"no packages in {INDEX}: python -m tests.package_index build/index")
    if not CLUSTER.exists():
        pytest.skip(f"no {CLUSTER} to name images with; KFP_DDP_CLUSTER names another program")
    for image, packages in ((PUBLIC.launcher, ()), (PUBLIC.trainer, ("torch", "functorch"))):
        folder = CHECKOUT / "build" / image.partition("/")[2].replace(":", "-")
        subprocess.run(["python3", "-m", "venv", "--clear", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for package in packages:
            for path in Path(sys.prefix, *site.relative_to(folder).parts).glob(f"{package}*"):
                if not path.name.startswith(("torchmetrics", "torchcodec")):
                    (site / path.name).symlink_to(os.path.relpath(path, site))
        environment = {"KF_PATH": f"{IN_PODS / folder.relative_to(CHECKOUT)}/bin:/usr/bin:/bin"}
        subprocess.run([CLUSTER, "image", image], check=True, env={**os.environ, **environment})
    return PUBLIC


@pytest.fixture(scope="module")
def public(
    cluster: client.ApiClient,
    bucket_url: str,
    images: Images,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    """A namespace under PodSecurity `restricted`, in which nothing is installed yet."""
    environment = {"STORAGE_EMULATOR_HOST": bucket_url}
    folder = tmp_path_factory.mktemp("public")
    with make_scene(cluster, folder, environment, strict=QUOTA) as scene:
        yield scene


@pytest.fixture(scope="module")
def index(cluster: client.ApiClient) -> Iterator[str]:
    with serving_index(cluster, INDEX) as url:
        yield url


def test_a_step_without_the_source_ends_in_one_line(public: Scene) -> None:
    run = public.run(COMPILED, images=PUBLIC, **TRAINING).play()
    assert list(run.steps) == ["preflight"]
    assert (
        run.steps["preflight"]
        .log.strip()
        .splitlines()[-1]
        .startswith("error: no kfp_ddp in this image")
    )


@pytest.fixture(scope="module")
def installed(public: Scene, index: str) -> Scene:
    where = ("-n", public.grounds.namespace, "--launcher-image", PUBLIC.launcher)
    options = (*where, "--claims", "none", "--pip-index-url", index)
    first, again = kfp_ddp("install", *options), kfp_ddp("install", *options)
    assert first.returncode == 0, first.stderr
    assert f"ConfigMap {map_name()} unchanged" in again.stdout
    return public


@pytest.mark.smoke
def test_steps_take_the_source_and_their_packages(installed: Scene) -> None:
    document = COMPILED.with_name("sync_dataset.yaml")
    run = installed.run(document, images=PUBLIC, source=TRAINING["source"]).play()
    assert run.succeeded, run.explain()

    def index_state() -> str:
        where = ("-n", installed.grounds.namespace)
        findings = json.loads(kfp_ddp("doctor", "--json", *where).stdout)["findings"]
        return str(next(one["state"] for one in findings if one["what"] == "public images"))

    until(lambda: index_state() == "ok", "a pod that reached the index")


def test_component_of_a_file_reads_the_source_itself(installed: Scene, tmp_path: Path) -> None:
    """Compiled by KFP alone: nothing mounts the ConfigMap."""
    gate = components.load_component_from_file(str(CHECKOUT / "components/gate/component.yaml"))

    @dsl.pipeline(name="judged")  # type: ignore[untyped-decorator]
    def judged(accuracy: float) -> None:
        task = gate(accuracy=accuracy, rules={"min_accuracy": 0.5})
        kubernetes.set_security_context(task, run_as_user=1000, run_as_non_root=True)

    document = tmp_path / "judged.yaml"
    compiler.Compiler().compile(judged, str(document))
    run = installed.run(document, images=PUBLIC, accuracy=0.9).play()
    assert run.succeeded, run.explain()


@pytest.mark.parametrize("backend", ["pytorchjob", "trainjob"])
def test_public_images_train_a_model(installed: Scene, backend: str) -> None:
    run = installed.run(
        COMPILED,
        images=PUBLIC,
        **TRAINING | {"job": {"env": {"OMP_NUM_THREADS": "1"}, "nproc_per_node": 1}},
        backend=backend,
        nodes=2,
    )
    run.start().wait(1800)  # each step installs its packages
    assert run.succeeded, run.explain()
    assert "publish" in run.steps, run.explain()
