"""The source in a ConfigMap: what it contains, and how a pod of a bare image starts from it."""

import base64
import functools
import http.server
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from kfp_ddp import __version__
from kfp_ddp.client.submit.own_package import ensure_source
from kfp_ddp.core.container_images import KINDS, PUBLIC, Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import own_package as source
from kfp_ddp.jobs.shipping import worker_start
from kfp_ddp.jobs.shipping.code import tar_of
from tests.cluster import FakeApi
from tests.conftest import CHECKOUT
from tests.package_index import digest, index, serve_uv, wheel
from tests.serving import Handler, serving
from tests.tls import trusted

TELL = """
import importlib.metadata as m, kfp_ddp.where, kfpddp_one
by = [one.read_text("INSTALLER").strip() for one in m.distributions() if "one" in one.name]
print(kfp_ddp.where.TEXT, kfpddp_one.SAY, *by or ["none"])
"""
NO_UV = [f"uv==1.0 --hash=sha256:{'0' * 64}"]


def test_archive_has_the_package_and_its_locks() -> None:
    content = source.archive()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = set(tar.getnames())
        text = tar.extractfile("kfp_ddp/training/trainer.py")
        assert text is not None
        assert text.read() == (CHECKOUT / "training" / "trainer.py").read_bytes()
    assert {
        f"kfp_ddp/images/{kind}/requirements.lock" for kind in (*KINDS, "parquet", "uv")
    } <= names
    assert not [name for name in names if "__pycache__" in name or "/compiled/" in name]
    own = source.config_map("a")
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
        source.config_map("a", index)
    assert "pass" not in str(raised.value)


def test_workers_start_as_their_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"image": "a:1", "kind": "pytorchjob"}
    assert source.on_workers(fields, ["true"]) == {**fields, "command": ["true"]}
    monkeypatch.setenv(source.VARIABLE, "kfp-ddp-source-1")
    once = source.on_workers(fields, ["true"])
    spec = LaunchSpec.create(**source.on_workers(once, ["true"]))
    assert [one["mountPath"] for one in spec.volume_mounts] == [worker_start.FOLDER]
    assert spec.command[-3:] == ("kfp-ddp-source-1", "trainer", "true")
    assert spec.run_as_user == source.USER
    other = source.on_workers({**fields, "run_as_user": 7}, ["true"])
    assert LaunchSpec.create(**other).run_as_user == 7


Done = subprocess.CompletedProcess[str]


class Pod(NamedTuple):
    """Files as the ConfigMap is mounted, and what a pod of a bare image makes of them."""

    folder: Path
    name: str

    def start(self, *words: str, path: str = "", name: str = "", **more: str) -> Done:
        """Run the command of a step with the Python below this environment, which has only pip."""
        command = source.started(["python3", "-c", TELL, *words], "launcher", name or self.name)
        command[2] = command[2].replace(worker_start.FOLDER, str(self.folder))
        environment = {"PATH": path or f"{sys.base_prefix}/bin:/usr/bin:/bin"}
        environment |= {"TMPDIR": str(self.folder.parent), **more}
        # Not in the checkout: Python would find the package in it.
        return subprocess.run(
            command, cwd=self.folder.parent, env=environment, capture_output=True, text=True
        )


def make_pod(
    folder: Path, lock: list[str], uv: list[str], more: Sequence[str] = (), **options: str
) -> Pod:
    """Return a pod of a package with one module, and of these locks; `more`: of MORE, each."""
    images = "kfp_ddp/images/{}/requirements.lock"
    files = {
        "kfp_ddp/where.py": "TEXT = 'from the map'\n",
        images.format("launcher"): "".join(f"{pin}\n" for pin in lock),
        **{
            images.format(name): "".join(f"{pin}\n" for pin in more)
            for name in worker_start.MORE["launcher"]
        },
        images.format("uv"): "".join(f"{pin}\n" for pin in uv),
    }
    content = tar_of((name, text.encode(), 0o644) for name, text in files.items())
    mounted = folder / "map"
    mounted.mkdir()
    (mounted / worker_start.ARCHIVE).write_bytes(lzma.compress(content))
    start = source.start_of(content).replace(worker_start.FOLDER, str(mounted))
    (mounted / source.START).write_text(start)
    for option in worker_start.IN_MAP:
        (mounted / option).write_text(options.get(option.replace("-", "_"), ""))
    return Pod(mounted, source.name_of(start))


def locked(folder: Path) -> list[str]:
    """Return a lock of the two packages of the index in a folder."""
    wheels = [folder / f"kfpddp_{name}-1.0-py3-none-any.whl" for name in ("one", "two")]
    return [f"kfpddp-{w.name[7:10]}==1.0 \\\n    --hash=sha256:{digest(w)}" for w in wheels]


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    """A pod whose index has no uv."""
    url = index(tmp_path)
    return make_pod(tmp_path, locked(tmp_path), NO_UV, index_url=url)


def last_line(done: Done) -> str:
    """Return the one line of a step that failed."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_bare_image_starts_from_the_map_by_pip(pod: Pod) -> None:
    done = pod.start()
    assert done.stdout.splitlines()[-1:] == ["from the map one 1.0 pip"], done.stdout + done.stderr
    assert "there is no uv" in done.stderr


@pytest.mark.parametrize(
    ("value", "variables", "more"),
    [
        ("gs://bucket/pets", {}, False),
        ("hf://datasets/owner/pets", {}, True),
        ({"registry": "mlflow"}, {}, True),
        ("", {"MLFLOW_RUN_ID": "1"}, True),
    ],
)
def test_a_step_brings_large_packages_only_if_it_needs_them(
    tmp_path: Path, value: object, variables: dict[str, str], more: bool
) -> None:
    url = index(tmp_path)
    first, second = locked(tmp_path)
    older = first.replace("==1.0", "==2.0 ; python_version < '3'")
    pod = make_pod(tmp_path, [first, older], NO_UV, [first, second], index_url=url)
    done = pod.start(json.dumps({"value": value}), **variables)
    assert "kfpddp-one==1.0" in done.stdout, done.stderr
    assert ("kfpddp-two==1.0" in done.stdout) == more


class Maps(Handler):
    """An API server with one ConfigMap, for those who have the token."""

    def do_GET(self) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        begin = "/api/v1/namespaces/space/configmaps/kfp-ddp-source-"
        allowed = self.headers["Authorization"] == "Bearer the-token"
        packed = base64.b64encode((folder / worker_start.ARCHIVE).read_bytes()).decode()
        names = (source.START, *worker_start.IN_MAP)
        found = {
            "data": {name: (folder / name).read_text() for name in names},
            "binaryData": {worker_start.ARCHIVE: packed},
        }
        self.answer(200 if allowed and self.path.startswith(begin) else 403, found)


@pytest.mark.parametrize(
    ("token", "spoilt", "said"),
    [
        ("the-token", False, "from the map one 1.0 pip"),
        ("another", False, "cannot be read (HTTP Error 403"),
        ("the-token", True, "another source than its name"),
    ],
)
def test_pod_without_a_volume_reads_the_map_itself(
    pod: Pod, tmp_path: Path, token: str, spoilt: bool, said: str
) -> None:
    """By its account, and not through a proxy."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Maps)
    server.folder = pod.folder  # type: ignore[attr-defined]
    account = tmp_path / "account"
    account.mkdir()
    if spoilt:
        with (pod.folder / source.START).open("a") as file:
            file.write("# changed\n")
    with trusted(tmp_path) as context, serving(server) as url:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        for name, text in (("token", token), ("namespace", "space")):
            (account / name).write_text(text)
        (account / "ca.crt").write_bytes((tmp_path / "peer.pem").read_bytes())
        command = source.alone(["python3", "-c", TELL], "launcher", pod.name)
        address = url.replace("http:", "https:")
        for word, other in ((source.API, address), (source.ACCOUNT, str(account))):
            command[2] = command[2].replace(word, other)
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={
                "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
                "HTTPS_PROXY": "http://127.0.0.1:1",
            },
            capture_output=True,
            text=True,
        )
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


PEP_668 = Path("/usr/lib/python3.11/EXTERNALLY-MANAGED")


@pytest.mark.parametrize("path", ["", "/usr/bin:/bin"])
def test_bare_image_starts_from_the_map_by_uv(tmp_path: Path, path: str) -> None:
    """The Python of a distribution refuses pip outside of environments (PEP 668)."""
    if path and not PEP_668.exists():
        pytest.skip(f"no {PEP_668}")
    url = index(tmp_path)
    done = make_pod(tmp_path, locked(tmp_path), serve_uv(tmp_path), index_url=url).start(path=path)
    assert done.stdout.splitlines()[-1:] == ["from the map one 1.0 uv"], done.stdout + done.stderr
    assert not done.stderr


class Proxy(http.server.SimpleHTTPRequestHandler):
    """Serves the folder of an index for whatever host is asked for."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(urlsplit(path).path)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def test_index_behind_a_proxy(tmp_path: Path) -> None:
    index(tmp_path)
    uv = serve_uv(tmp_path)
    handler = functools.partial(Proxy, directory=str(tmp_path))
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as proxy:
        url = "http://index.invalid/simple"
        options = source.config_map("a", url, proxy)["data"]
        options = {name.replace("-", "_"): text for name, text in options.items()}
        done = make_pod(tmp_path, locked(tmp_path), uv, **options).start()
    assert done.stdout.splitlines()[-1:] == ["from the map one 1.0 uv"], done.stdout + done.stderr


def test_settings_of_pip_are_those_of_uv() -> None:
    listed = (
        ":env:.index-url='https://env/simple'\n:env:.user='1'\nglobal.cert='/a b.pem'\n"
        "global.index-url='https://global/simple'\ninstall.extra-index-url='\\nhttps://a\\nhttps://b'\n"
        "install.trusted-host=''\n"
    )
    assert worker_start.as_uv(listed) == {
        "UV_DEFAULT_INDEX": "https://env/simple",
        "SSL_CERT_FILE": "/a b.pem",
        "UV_INDEX": "https://a https://b",
    }


HOSTILE = "import sys; sys.exit('code of a stranger')"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no archive", id="no archive"),
        pytest.param(lzma.compress(b"another"), id="another"),
        pytest.param(lzma.compress(bytes(100 << 20)), id="too large"),
    ],
)
def test_map_without_the_source_ends_in_one_line(pod: Pod, content: bytes) -> None:
    (pod.folder / worker_start.ARCHIVE).write_bytes(content)
    last_line(pod.start())


@pytest.mark.parametrize("text", [None, "", HOSTILE])
def test_start_program_of_a_stranger_does_not_run(pod: Pod, text: str | None) -> None:
    """Nor one that was made for another archive."""
    for name in (source.START, "sitecustomize.py"):
        (pod.folder / name).write_text(text or "")
    if text is None:
        (pod.folder / source.START).unlink()
    assert "kfp-ddp install" in last_line(pod.start())
    (pod.folder / source.START).write_text(source.start_of(b"another"))
    assert "another source than its name" in last_line(pod.start())


def test_map_of_another_state_is_refused_whatever_its_name(pod: Pod) -> None:
    assert "another source than its name" in last_line(pod.start(name=source.map_name()))


def test_settings_of_pip_in_the_map_are_not_read(pod: Pod) -> None:
    """Such as `python`, another program that pip runs in its place."""
    program = pod.folder / "stranger"
    program.write_text("#!/bin/sh\necho code of a stranger; exit 1\n")
    program.chmod(0o755)
    (pod.folder / "pip.conf").write_text(f"[global]\npython = {program}\n")
    done = pod.start()
    assert done.stdout.splitlines()[-1:] == ["from the map one 1.0 pip"], done.stdout + done.stderr


@pytest.mark.parametrize("own", [__version__, "0.1.0"])
def test_image_with_the_package_is_of_the_same_version(pod: Pod, own: str) -> None:
    package = pod.folder.parent / "image" / "kfp_ddp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {own!r}\n")
    (package / "where.py").write_text("TEXT = 'from the image'\n")
    (package.parent / "kfpddp_one.py").write_text("SAY = 'mine'\n")
    done = pod.start(PYTHONPATH=str(package.parent))
    if own == __version__:
        assert done.stdout == "from the image mine none\n", done.stderr
    else:
        assert f"this image has kfp_ddp {own}" in last_line(done)


PLANT = """
import json, os, shutil, sys
from pip._internal.cache import SimpleWheelCache
from pip._internal.models.link import Link
cache, url, planted, digest = sys.argv[1:]
folder = SimpleWheelCache(cache).get_path_for_link(Link(f"{url}#sha256={digest}"))
os.makedirs(folder)
shutil.copy(planted, folder)
with open(f"{folder}/origin.json", "w") as file:
    json.dump({"url": url, "archive_info": {"hashes": {"sha256": digest}}}, file)
"""
"""As pip remembers a wheel that it has built itself, of which it knows no hash."""


@pytest.mark.parametrize("uv", [False, True])
def test_planted_wheel_in_a_cache_is_not_installed(tmp_path: Path, uv: bool) -> None:
    url = index(tmp_path)
    pod = make_pod(tmp_path, locked(tmp_path), serve_uv(tmp_path) if uv else NO_UV, index_url=url)
    genuine = tmp_path / "kfpddp_one-1.0-py3-none-any.whl"
    (tmp_path / "planted").mkdir()
    planted = wheel(tmp_path / "planted", "kfpddp_one", "1.0", "SAY = 'stranger'\n", [])
    cache, link = str(tmp_path / "cache"), url.replace("/simple", f"/{genuine.name}")
    python = f"{sys.base_prefix}/bin/python3"
    subprocess.run([python, "-c", PLANT, cache, link, planted, digest(genuine)], check=True)
    done = pod.start(PIP_CACHE_DIR=cache, UV_CACHE_DIR=cache)
    assert "one 1.0" in done.stdout.splitlines()[-1], done.stderr


@pytest.mark.parametrize("uv", [False, True])
def test_package_without_a_wheel_is_not_built(tmp_path: Path, uv: bool) -> None:
    url = index(tmp_path)
    file = tmp_path / "kfpddp_one-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for name, text in (("setup.py", HOSTILE), ("PKG-INFO", "Name: kfpddp-one\nVersion: 1.0\n")):
            (tmp_path / name).write_text(text)
            tar.add(tmp_path / name, f"kfpddp_one-1.0/{name}")
    page = tmp_path / "simple" / "kfpddp-one" / "index.html"
    page.write_text(f'<a href="../../{file.name}#sha256={digest(file)}">{file.name}</a>')
    lock = [f"kfpddp-one==1.0 --hash=sha256:{digest(file)}"]
    done = make_pod(tmp_path, lock, serve_uv(tmp_path) if uv else NO_UV, index_url=url).start()
    assert "only wheels are installed" in last_line(done)
    assert "stranger" not in done.stdout + done.stderr


@pytest.mark.parametrize("uv", [False, True])
def test_wheel_with_another_hash_is_not_installed(tmp_path: Path, uv: bool) -> None:
    url = index(tmp_path)
    lock = locked(tmp_path)
    wheel(tmp_path, "kfpddp_one", "1.0", "SAY = 'stranger'\n", [])
    done = make_pod(tmp_path, lock, serve_uv(tmp_path) if uv else NO_UV, index_url=url).start()
    assert "DO NOT MATCH THE HASHES" in last_line(done)


def test_map_is_created_once_and_compared_by_its_bytes() -> None:
    api = FakeApi({})
    name = source.map_name()
    assert ensure_source(api) == ensure_source(api) == name
    (created,) = api.objects.values()
    assert source.has_source(created)
    assert not source.has_source({**created, "data": {source.START: HOSTILE}})
    packed = created["binaryData"][worker_start.ARCHIVE]
    another = base64.b64encode(lzma.compress(b"code of a stranger")).decode()
    for planted in ("", "no base64", packed[: len(packed) // 2], another):
        created["binaryData"] = {worker_start.ARCHIVE: planted}
        with pytest.raises(InputError, match="another source than its name"):
            ensure_source(api)
    del created["binaryData"]
    assert not source.has_source(created)
    # Another level of compression is the same source.
    packed = base64.b64encode(lzma.compress(source.archive(), preset=0)).decode()
    created["binaryData"] = {worker_start.ARCHIVE: packed}
    assert ensure_source(api) == name


def test_another_state_has_a_map_of_its_own(tmp_path: Path) -> None:
    name = source.map_name()
    text = f"{name} and {name}, not {name[:-1]} nor kfp-ddp-source-9-9-9-{name[-32:]}"
    assert source.renamed(text, "new") == (
        f"new and new, not {name[:-1]} nor kfp-ddp-source-9-9-9-{name[-32:]}"
    )
    package = copy_of_the_package(tmp_path)
    (package / "where.py").write_text("TEXT = 'more'\n")
    assert source.archive(package) != source.archive()


def copy_of_the_package(folder: Path) -> Path:
    package = folder / "kfp_ddp"
    shutil.copytree(CHECKOUT / "kfp_ddp", package)  # what is linked, too
    return package


def test_archive_is_the_same_beside_what_is_not_in_git(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    junk = (
        *("jobs/run.py~", "jobs/.run.py.swp", "jobs/#run.py#", "jobs/run.py.orig", "jobs/run.so"),
        *("jobs/__pycache__/run.cpython-311.pyc", ".ipynb_checkpoints/run.py", "jobs/.hidden.py"),
    )
    for name in junk:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("junk")
    (package / "jobs" / ".#run.py").symlink_to("me@host.1234")  # Emacs' lock of a file
    for path in package.rglob("[a-z]*.py"):
        os.utime(path, (0, 0))
        path.chmod(0o755)
    assert source.archive(package) == source.archive()


def test_archive_has_what_is_in_git() -> None:
    if not (CHECKOUT / ".git").exists():
        pytest.skip("no checkout of git")
    folders = ("components", "kfp_ddp", "pipelines", "training")
    listed = subprocess.check_output(["git", "ls-files", *folders], cwd=CHECKOUT, text=True)
    files = {name if name.startswith("kfp_ddp/") else f"kfp_ddp/{name}" for name in listed.split()}
    with tarfile.open(fileobj=io.BytesIO(source.archive())) as tar:
        names = set(tar.getnames())
    left = {name for name in files - names if not (CHECKOUT / name).is_dir()}
    beside = {name for name in left if "/tests/" in name}
    assert {Path(name).suffix for name in beside} == {".py"}
    left -= beside
    of_people = ("OWNERS", "README.md", "component.yaml", "metadata.yaml", "py.typed")
    assert {Path(name).name for name in left} <= {*of_people}, sorted(left)
