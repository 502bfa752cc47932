"""Images and the wheel, where no container engine is: their files and their installs."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kfp_ddp.core.container_images import PUBLIC
from kfp_ddp.jobs.shipping.own_package import map_name

REPOSITORY = Path(__file__).parents[2]
ROOT_LOCK = REPOSITORY / "requirements.lock"
PACKAGE = re.compile(r"^([a-z0-9.-]+)==(\S+)", re.MULTILINE)


def dockerfile(image: str) -> list[str]:
    text = (REPOSITORY / "images" / image / "Dockerfile").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned(lock: Path) -> set[tuple[str, str]]:
    return set(PACKAGE.findall(lock.read_text()))


@pytest.mark.parametrize("image", ["launcher", "trainer"])
def test_copied_files_exist(image: str) -> None:
    copies = [shlex.split(line)[1:-1] for line in dockerfile(image) if line.startswith("COPY")]
    sources = [source for copy in copies if "--from=wheel" not in copy for source in copy]
    assert "pyproject.toml" in sources
    assert [source for source in sources if not (REPOSITORY / source).exists()] == []


@pytest.mark.parametrize("image", ["launcher", "server", "trainer"])
def test_image_does_not_run_as_root_and_its_base_is_an_argument(image: str) -> None:
    lines = dockerfile(image)
    assert re.fullmatch(r"ARG BASE=\S+:\d+\.\d+\.\d+-[\w-]+@sha256:[0-9a-f]{64}", lines[0])
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    assert all(line.split()[1] == "${BASE}" for line in lines if line.startswith("FROM"))


def test_lock_has_what_its_packages_require() -> None:
    # It is installed without resolving dependencies. CPU=1 leaves some out that it has.
    lock = {canonicalize_name(name): version for name, version in pinned(ROOT_LOCK)}
    missing = list[str]()
    for distribution in importlib.metadata.distributions():
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = lock.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                missing.append(f"{distribution.name} requires {text}")
    assert missing == []


@pytest.mark.parametrize("image", ["launcher", "server", "trainer", "wheel"])
def test_lock_of_an_image_is_a_part_of_the_lock(image: str) -> None:
    part = pinned(REPOSITORY / "images" / image / "requirements.lock")
    assert part
    assert part <= pinned(ROOT_LOCK)


def test_launcher_has_no_torch() -> None:
    names = {name for name, _ in pinned(REPOSITORY / "images/launcher/requirements.lock")}
    assert "kubernetes" in names
    assert names.isdisjoint({"torch", "torchvision"})


def test_base_is_a_supported_python() -> None:
    assert dockerfile("trainer")[0] == dockerfile("launcher")[0] == dockerfile("server")[0]
    assert dockerfile("trainer")[0].startswith("ARG BASE=docker.io/library/python:3.11.")


def test_public_launcher_is_the_base_by_its_digest() -> None:
    assert dockerfile("launcher")[0] == f"ARG BASE={PUBLIC['launcher']}"
    job = (REPOSITORY / "deploy" / "source" / "index.yaml").read_text()
    assert f"image: {PUBLIC['launcher']}\n" in job


@pytest.mark.parametrize("image", ["launcher", "server", "trainer"])
def test_nothing_is_built_with_tools_that_no_lock_has(image: str) -> None:
    text = " ".join(dockerfile(image))
    installs = re.findall(r"pip install [^&;]*?(?=&&|;| RUN | COPY | USER |$)", text)
    assert len(installs) >= 3
    for command in installs:
        wheels = "--only-binary :all:" in command or "--no-index" in command
        assert wheels, command
        from_an_index = "--no-index" not in command and "$TORCH_INDEX" not in command
        assert not from_an_index or "--require-hashes" in command, command
    assert "--no-build-isolation" in text


@pytest.mark.parametrize("image", ["launcher", "server", "trainer"])
def test_images_lack_the_client_that_has_no_wheel(image: str) -> None:
    """Steps import KFP as its executor does, without the client of its API."""
    names = {name for name, _ in pinned(REPOSITORY / "images" / image / "requirements.lock")}
    assert "kfp" in names
    assert "kfp-server-api" not in names


def test_missing_build_tools_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    script = ["/bin/bash", str(REPOSITORY / "images" / "build.sh"), "launcher"]
    done = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith("apt-get install buildah mmdebstrap")


def test_images_have_one_base_and_only_our_files() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        shlex.split(line)[1].partition("/")[0]
        for image in ("launcher", "trainer")
        for line in dockerfile(image)
        if line.startswith("COPY") and "--from" not in line
    }
    assert copied <= let_in
    assert let_in - copied <= {"README.md", "LICENSE", "images"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(REPOSITORY)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_has_every_module_and_file_of_the_package(wheel: Path) -> None:
    """The links of kfp_ddp/ are folders in the wheel, without the tests in them."""
    root = REPOSITORY / "kfp_ddp"
    files = {
        f"kfp_ddp/{path.relative_to(root).as_posix()}"
        for folder in (root, *(link for link in root.iterdir() if link.is_symlink()))
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "tests"} & {*path.parts}
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {"kfp_ddp/training/spec/config.py", "kfp_ddp/report/templates/style.css"} <= files
    assert files - packed == set()


@pytest.mark.slow
def test_wheel_works_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", str(wheel)], check=True)
    probe = "import kfp_ddp.components, kfp_ddp.pipelines, kfp_ddp.training"
    subprocess.run([python, "-c", probe], check=True, cwd=tmp_path)
    program = tmp_path / "venv" / "bin" / "kfp-ddp"
    shown = subprocess.run([program, "--help"], check=True, capture_output=True, text=True)
    assert "Runs on Kubeflow Pipelines:" in shown.stdout
    out = tmp_path / "compiled"
    subprocess.run([program, "compile", "--directory", out], check=True, capture_output=True)
    # The digest of its source is that of the checkout.
    assert map_name() in (out / "train_resnet.yaml").read_text()
