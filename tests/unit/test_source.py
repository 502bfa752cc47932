"""The source in a ConfigMap: what it contains, and how a pod of a bare image starts from it."""

import base64
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp import __version__
from kfp_ddp.client.submission import ensure_source
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import KINDS, PUBLIC, Images
from kfp_ddp.jobs import source
from kfp_ddp.jobs.launch_spec import LaunchSpec
from tests.cluster import FakeApi
from tests.conftest import CHECKOUT
from tests.package_index import digest, index

TELL = "import kfp_ddp.where, kfpddp_one, os; print(kfp_ddp.where.TEXT, kfpddp_one.SAY)"


def test_archive_has_the_package_and_its_locks() -> None:
    content = source.archive()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = set(tar.getnames())
        text = tar.extractfile("kfp_ddp/training/trainer.py")
        assert text is not None
        assert text.read() == (CHECKOUT / "training" / "trainer.py").read_bytes()
    assert {f"{kind}.lock" for kind in KINDS} <= names
    assert not [name for name in names if "__pycache__" in name or "/compiled/" in name]
    own = source.config_map(content, "a")
    size = sum(map(len, own["data"].values())) + len(base64.b64decode(*own["binaryData"].values()))
    assert size < 800_000, "1 MiB is the limit of a ConfigMap"


def test_torch_of_the_public_image_is_that_of_the_lock() -> None:
    lock = (CHECKOUT / "images" / "trainer" / "requirements.lock").read_text()
    ((_, cuda), (_, torch)) = re.findall(r"^(nvidia-cuda-runtime|torch)==(\S+)", lock, re.M)
    assert f":{torch}-cuda{cuda.rpartition('.')[0]}-cudnn9-" in PUBLIC["trainer"]


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ({}, PUBLIC["launcher"]),
        ({"images": "public", "registry": "a.b/c"}, PUBLIC["launcher"]),
        ({"launcher_image": "mirror.a/python:3.12"}, "mirror.a/python:3.12"),
        ({"images": "registry", "registry": "a.b/c/"}, f"a.b/c/launcher:{__version__}"),
    ],
)
def test_launcher_of_settings(settings: dict[str, str], image: str) -> None:
    assert Images.create(settings).launcher == image


@pytest.mark.parametrize("settings", [{"images": "mine"}, {"images": "registry"}])
def test_unclear_images_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InputError):
        Images.create(settings)


@pytest.mark.parametrize(
    "index",
    [
        *("ftp://a/simple", "https://me:pass@a/simple", "simple", "https://a/simple?token=pass@"),
        *("https://me:pass%40a/simple", "https://me:pa/pass@a/simple", "https:/me:pass@a/simple"),
    ],
)
def test_index_with_a_login_or_of_another_kind_is_refused(index: str) -> None:
    with pytest.raises(InputError) as raised:
        source.config_map(b"", "a", index)
    assert "pass" not in str(raised.value)


def test_workers_start_as_their_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"image": "a:1", "kind": "pytorchjob"}
    assert source.on_workers(fields, ["true"]) == {**fields, "command": ["true"]}
    monkeypatch.setenv(source.VARIABLE, "kfp-ddp-source-1")
    once = source.on_workers(fields, ["true"])
    spec = LaunchSpec.create(**source.on_workers(once, ["true"]))
    assert [one["mountPath"] for one in spec.volume_mounts] == [source.FOLDER]
    assert spec.command[-3:] == ("kfp-ddp-source-1", "trainer", "true")
    assert spec.run_as_user == source.USER
    other = source.on_workers({**fields, "run_as_user": 7}, ["true"])
    assert LaunchSpec.create(**other).run_as_user == 7


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the ConfigMap is mounted, of a package with one module and a lock of one pin."""
    url = index(tmp_path)
    wheels = [tmp_path / f"kfpddp_{name}-1.0-py3-none-any.whl" for name in ("one", "two")]
    pins = [f"kfpddp-{w.name[7:10]}==1.0 \\\n    --hash=sha256:{digest(w)}\n" for w in wheels]
    files = {"kfp_ddp/where.py": "TEXT = 'from the map'\n", "launcher.lock": "".join(pins)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in files.items():
            (tmp_path / "packed").write_text(text)
            tar.add(tmp_path / "packed", name)
    folder = tmp_path / "map"
    folder.mkdir()
    own = source.config_map(packed.getvalue(), "kfp-ddp-source-1")
    for name, text in own["data"].items():
        (folder / name).write_text(text)
    (folder / source.ARCHIVE).write_bytes(base64.b64decode(own["binaryData"][source.ARCHIVE]))
    (folder / source.PIP).write_text(f"[global]\nindex-url = {url}\n")
    return folder


def start(pod: Path, name: str = "kfp-ddp-source-1") -> "subprocess.CompletedProcess[str]":
    """Run the command of a step with the Python below this environment, which has only pip."""
    command = source.started(["python3", "-c", TELL], "launcher", name)
    command[2] = command[2].replace(source.FOLDER, str(pod))
    environment = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "TMPDIR": str(pod.parent)}
    # Not in the checkout: Python would find the package in it.
    return subprocess.run(command, cwd=pod.parent, env=environment, capture_output=True, text=True)


def test_bare_image_starts_from_the_map(pod: Path) -> None:
    done = start(pod)
    assert done.stdout.splitlines()[-1:] == ["from the map one 1.0"], done.stdout + done.stderr


def test_map_of_another_version_or_none_ends_in_one_line(pod: Path) -> None:
    for done in (start(pod, "kfp-ddp-source-2"), start(pod / "missing")):
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert "kfp-ddp install" in line


def test_map_is_created_once_and_another_state_has_its_own() -> None:
    api = FakeApi({})
    assert ensure_source(api) == ensure_source(api) == source.map_name()
    (created,) = api.objects.values()
    created["metadata"]["labels"][source.DIGEST] = "another"
    state = source.digest_of(source.archive())
    assert ensure_source(api) == ensure_source(api) == source.map_name(state)
    assert len(api.objects) == 2
