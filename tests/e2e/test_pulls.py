"""Images that are not in their registry, that need a login, or that come slowly."""

import hashlib
import io
import json
import platform
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import requests
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.grounds import Grounds
from tests.e2e.harness.launch_step import LaunchStep
from tests.e2e.harness.namespace import namespace
from tests.e2e.harness.programs import kfp_ddp
from tests.serving import Handler, free_port, serving_by
from tests.stores import registry, registry_program

OCI = "application/vnd.oci.image"
LOGIN = {"username": "ana", "password": "pull-me"}
HASHED = "ana:$2b$04$zAkia6w3tf8jykZ2ZwxMmuVqCTCg4Ufvq7q6dxwamxJXy86zd41Z6"
PAUSE = 0.4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="module")
def host(cluster: client.ApiClient, folder: Path) -> Iterator[str]:
    """A registry with the image `trainer:1`."""
    with registry(folder / "images", folder / "open") as host:
        push(host)
        yield host


@pytest.fixture(scope="module")
def locked(host: str, folder: Path) -> Iterator[str]:
    """The same images, for those with a login."""
    with registry(folder / "images", folder / "locked", HASHED) as locked:
        yield locked


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    workflow.define(cluster)
    with namespace(cluster) as space:
        yield space


def test_image_that_cannot_be_pulled_ends_the_job(grounds: Grounds, host: str, locked: str) -> None:
    away = f"127.0.0.1:{free_port()}"
    steps = {
        "not found); correct its name": launched(grounds, f"{host}/absent:1"),
        "401 Unauthorized); correct its name, or log in": launched(grounds, f"{locked}/trainer:1"),
        "connection refused); let nodes reach the registry": launched(
            grounds, f"{away}/trainer:1", pending_minutes=0.5
        ),
    }
    for why, step in steps.items():
        assert step.wait(200) == "Failed"
        last = step.log().splitlines()[-1]
        assert "worker-0: cannot pull 127.0.0.1:" in last, step.log()
        assert why in last, step.log()
        assert step.jobs() == []


def test_image_is_pulled_with_the_login_of_a_secret(grounds: Grounds, locked: str) -> None:
    logins = {"auths": {locked: LOGIN}}
    secret = {
        "metadata": {"name": "registry"},
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": json.dumps(logins)},
    }
    grounds.core.create_namespaced_secret(grounds.namespace, secret)
    step = launched(grounds, f"{locked}/trainer:1", image_pull_secrets=["registry"])
    assert step.wait() == "Succeeded", step.log()


def test_slow_pull_is_waited_for(grounds: Grounds, host: str) -> None:
    push(host)
    Slow.upstream, began = host, time.monotonic()
    with serving_by(Slow) as url:
        step = launched(grounds, f"{url.removeprefix('http://')}/trainer:1")
        assert step.wait() == "Succeeded", step.log()
    assert time.monotonic() - began > 50 * PAUSE
    assert "is created: worker-0: starting" in step.log()
    assert "cannot pull" not in step.log()


def test_install_gives_up_an_image_that_is_not_there(cluster: client.ApiClient, host: str) -> None:
    with namespace(cluster, ours=False) as space:
        options = ("--no-see-nodes", "--storage-class", "standard", "--size", "1Gi")
        absent = f"{host}/absent:1"
        done = kfp_ddp("install", "-n", space.namespace, *options, "--image", absent)
    assert done.returncode == 1
    assert "give --image, one that nodes can pull" in done.stderr
    assert f"cannot pull {absent} (ErrImagePull: " in done.stderr


def launched(grounds: Grounds, image: str, **more: Any) -> LaunchStep:
    """A step that launches a job of one pod, which ends soon."""
    command = ["/registry", "--version"]
    return LaunchStep(grounds, {"image": image, "command": command, "retries": 0, **more}).start()


class Slow(Handler):
    """Passes what another registry answers, one megabyte in PAUSE."""

    upstream = ""

    def do_GET(self) -> None:
        request = Request(f"http://{self.upstream}{self.path}", method=self.command)
        request.add_header("Accept", self.headers["Accept"])
        with urlopen(request) as reply:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            while block := reply.read(1 << 20):
                time.sleep(PAUSE)
                self.wfile.write(block)

    do_HEAD = do_GET


def push(host: str) -> None:
    """Put an image into a registry: its own program, in a layer that no node has."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(registry_program(), "registry")
        tar.addfile(tarfile.TarInfo(uuid.uuid4().hex))
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    root = {"type": "layers", "diff_ids": [digest(layer.getvalue())]}
    config = json.dumps({"architecture": machine, "os": "linux", "rootfs": root}).encode()
    manifest: dict[str, Any] = {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json"}
    for kind, content in (("config.v1+json", config), ("layer.v1.tar", layer.getvalue())):
        place = requests.post(f"http://{host}/v2/trainer/blobs/uploads/").headers["Location"]
        requests.put(f"{place}&digest={digest(content)}", content).raise_for_status()
        manifest[kind.partition(".")[0]] = {
            "mediaType": f"{OCI}.{kind}", "digest": digest(content), "size": len(content)
        }  # fmt: skip
    manifest["layers"] = [manifest.pop("layer")]
    headers = {"Content-Type": manifest["mediaType"]}
    url = f"http://{host}/v2/trainer/manifests/1"
    requests.put(url, json.dumps(manifest), headers=headers).raise_for_status()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
