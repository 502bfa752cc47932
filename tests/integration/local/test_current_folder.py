"""Commands in a stranger's folder, where each file that any of them could read is hostile."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.sync import sync
from kfp_ddp.local.demo import DEMO, DIGITS
from kfp_ddp.local.folder import data_of, identity_of
from kfp_ddp.pipelines.form import form_of
from tests import photographs, run_output
from tests.files import write

PLACES = (
    *("", "~/", "~/.config/kfp-ddp/", ".config/kfp-ddp/", "kfp-ddp/", "kfp_ddp_files/"),
    *("run-output/", "run-output/data/", "demo-output/", "photos/"),
)
MODULES = (
    *("sitecustomize", "usercustomize", "conftest", "setup", "network", "mine", "model"),
    *("pydantic", "torch", "numpy", "yaml", "click", "kfp", "PIL", "psutil", "requests", "git"),
)
TEXTS = {
    "kfp-ddp.yaml": "images: registry\nregistry: theirs.example.com\ndestination: {theirs}\n",
    "config.yaml": "destination: {theirs}\nhost: http://127.0.0.1:9\n",
    ".env": "LD_PRELOAD={theirs}/lib.so\nPYTHONPATH={theirs}\nKFP_DDP_DESTINATION={theirs}\n",
    "evil.pth": "import pathlib; pathlib.Path('{marker}').touch()\n",
    "pyproject.toml": "[tool.kfp-ddp]\ndestination = '{theirs}'\n",
    "setup.cfg": "[kfp_ddp]\ndestination = {theirs}\n",
    "requirements.txt": "{theirs}\n",
    "MLmodel": "flavors: {{python_function: {{loader_module: network}}}}\n",
    ".kfp-ddp": "",
    "key": "k" * 32,
    "matplotlibrc": "backend: module://network\n",
}
SMALL = ["model=cifar_resnet8", "image_size=16", "epochs=1", "cache_gb=0"]
RUN = ["run", "photos", "--local", "--ranks", "1", *(w for one in SMALL for w in ("--set", one))]


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that exists once code of the folder has run."""
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, marker: Path) -> Path:
    """The folder, with runs and datasets of exactly the commands below."""
    folder = tmp_path_factory.mktemp("checkout")
    theirs = folder / "theirs"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    for place in PLACES:
        for name in MODULES:
            write(folder / place / f"{name}.py", code)
        for name, text in TEXTS.items():
            write(folder / place / name, text.format(theirs=theirs, marker=marker))
    shutil.copytree(folder / "~", theirs)
    shutil.rmtree(folder / "photos")
    photos = photographs.write(folder / "photos", each=24)
    run_output.make(folder / "run-output" / "photos")
    arguments = form_of("train_resnet").read(None, SMALL)
    train = identity_of(source=str(photos), arguments=arguments, ranks=1)
    plant(folder / "run-output/photos", train, theirs)
    settings = DIGITS | {"epochs": 1} | {"job": {"nproc_per_node": 1}}
    plant(folder / "demo-output", f"{DEMO}{identity_of(demo=settings)}", theirs)
    swapped = Path(shutil.copytree(photos, folder / "swapped"))
    for one, other in (("bark", "gravel"), ("gravel", "water"), ("water", "bark")):
        shutil.rmtree(swapped / one)
        shutil.copytree(photos / other, swapped / one)
    for target in (folder / "run-output/data", folder / "run-output/data/0123456789abcdef"):
        version = sync(str(photos), target, SyncOptions()).path
        shutil.rmtree(version / "bark")
        shutil.copytree(swapped / "bark", version / "bark")
    return folder


def plant(folder: Path, identity: str, theirs: Path) -> None:
    """Write the record of an interrupted run as 0.1.0 did, with arguments and variables."""
    fields: dict[str, Any] = {
        "format": "kfp-ddp local run 1",
        "identity": identity,
        "arguments": {"source": theirs, "destination": theirs, "training": {"model": "network.py"}},
        "environment": {
            "PYTHONPATH": theirs,
            "PYTHONSAFEPATH": "",
            "LD_PRELOAD": f"{theirs}/lib.so",
        },
        "seed": "0123456789abcdef",
        "complete": False,
        "deletes": ["work", "artifacts", "cache", "bundle"],
        "folder": str(theirs),
        "data": str(theirs),
    }
    write(folder / "run.json", json.dumps(fields, default=str))


def command(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in the folder."""
    program = [sys.executable, "-m", *words]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["kfp_ddp", "config", "show"],
        ["kfp_ddp", "status", "run-output/photos"],
        ["kfp_ddp", "describe", "run-output/photos"],
        ["kfp_ddp", "logs", "run-output/photos"],
        ["kfp_ddp", "predict", "run-output/photos/bundle", "photos/bark"],
        ["kfp_ddp", "run", "photos", "--local", "--check", "--set", "pretrained=false"],
        ["kfp_ddp", "demo", "--epochs", "1", "--ranks", "1"],
        ["kfp_ddp.training", "--help"],
        ["kfp_ddp.training.node", "--", "--help"],
        ["kfp_ddp.training.spec.recipes", "digits", "--data", "photos", "--output-dir", "run"],
        ["kfp_ddp.evaluation.node", "--", "--help"],
    ],
    ids=" ".join,
)
def test_no_file_of_the_folder_runs(words: list[str], checkout: Path, marker: Path) -> None:
    ended = command(checkout, *words)
    assert not marker.exists(), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "theirs" not in ended.stdout


def test_the_demo_deletes_nothing_of_others(checkout: Path) -> None:
    before = (checkout / "demo-output" / "run.json").read_text()
    ended = command(checkout, "kfp_ddp", "demo", "--epochs", "1", "--ranks", "1")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 2), ended.stderr  # and a note
    assert (checkout / "demo-output" / "run.json").read_text() == before


@pytest.mark.slow
def test_a_run_begins_anew_with_images_of_the_source(checkout: Path, marker: Path) -> None:
    ended = command(checkout, "kfp_ddp", *RUN, "--json")
    assert not marker.exists(), ended.stderr
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    run = Path(summary["bundle"]).parent
    assert run == checkout / "run-output" / "photos-2"
    assert (summary["files"], summary["files_copied"]) == (72, 72)
    assert not (checkout / "theirs" / "photos").exists()
    data = data_of(run.parent) / "current"
    for photo in checkout.glob("photos/*/*.jpg"):
        copy = data / photo.relative_to(checkout / "photos")
        assert copy.read_bytes() == photo.read_bytes()
    ranks = ["kfp_ddp.training.node", "--nproc-per-node", "1", "--", "--data", str(data)]
    flags = ["--output-dir", "alone", *(f"--{one}" for one in SMALL)]
    alone = command(checkout, *ranks, *flags)
    assert alone.returncode == 0, alone.stderr
    assert not marker.exists()
