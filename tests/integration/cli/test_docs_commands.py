"""The commands of the pages and the files in examples/ run."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from kfp_ddp.local.results import outputs
from kfp_ddp.training import rank
from kfp_ddp.training.data import image_files, transforms
from kfp_ddp.training.model import networks
from kfp_ddp.training.spec.config import parse
from kfp_ddp.training.state.checkpoint import load_model, newest_valid
from tests.commands import call, output
from tests.kfp_server.server import KfpServer
from tests.local_pipeline import pipeline
from tests.pages import ROOT, SETTINGS_FILE, of_ours, typed
from tests.photographs import plain, write

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("cluster", "laptop", "nightly", "release")))
# Commands that need a cluster, a bucket, minutes or a person; other tests run them.
ELSEWHERE = {
    *("compile", "install", "doctor", "demo", "predict", "compare", "describe", "logs", "download"),
    *("models", "promote", "retry", "rollback", "serve", "verify"),
}
FOLLOWS = ("--follow", "--watch")
"""Options that wait for the end of a run."""
EXAMPLES = ROOT / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml"))


@pytest.fixture
def scene(tmp_path: Path, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> KfpServer:
    """Compiled pipelines, photographs, settings, and a server with a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
    monkeypatch.setenv("KFP_DDP_REGISTRY", "registry.example.com/ml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write(tmp_path / "photos", 2)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "compiled").symlink_to(ROOT / "compiled")
    (tmp_path / "compiled").symlink_to(ROOT / "compiled")
    for page in PAGES:
        for name, settings in SETTINGS_FILE.findall((ROOT / page).read_text()):
            (tmp_path / name).write_text(settings)
    return kfp_server


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_succeed(page: str, scene: KfpServer) -> None:
    ours = [words for words in filter(None, map(of_ours, typed(ROOT / page))) if here(words)]
    assert ours
    for words in ours:
        arguments = [word for word in words if word not in FOLLOWS]
        answer = call(*arguments)
        message = f"kfp-ddp {' '.join(arguments)}: {answer.output}{answer.exception}"
        assert answer.exit_code == 0, message


def here(words: list[str]) -> bool:
    """Return whether a command needs no cluster, bucket or minutes."""
    of_a_bucket = words[0] == "sync" and words[1].startswith("gs:")
    return words[0] not in ELSEWHERE and "--local" not in words and not of_a_bucket


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    return plain(plain(folder / "train", 8).with_name("val"), 2).parent


def test_readme_lists_every_file() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in FILES)


def header(example: Path) -> Iterator[list[str]]:
    """Yield the commands that are indented in the text at the top of a file."""
    for line in re.sub(r"\\\n#? *", "", example.read_text()).splitlines():
        words = line.removeprefix("#").split()
        if words and line.startswith(("    ", "#     ")) and words[0] in ("kfp-ddp", "mkdir", "cp"):
            yield shlex.split(line.removeprefix("#"), comments=True)


@pytest.mark.parametrize(
    "example", [path for path in FILES if path.stem != "client"], ids=lambda path: path.name
)
def test_commands_at_the_top_work_as_printed(example: Path, scene: KfpServer) -> None:
    Path("build/compiled").unlink()
    Path("examples").symlink_to(EXAMPLES)
    if "csv" in example.name:
        classes = ("bark", "gravel", "water")
        rows = [f"{name}/img {number}.jpg,{name}" for name in classes for number in (0, 1)]
        Path("photos/labels.csv").write_text("\n".join(["path,label", *rows]))
    torch.save(networks.build("resnet18", 3).state_dict(), "resnet18.pth")
    written = list(header(example))
    assert written
    for words in written:
        words = [word.replace("photos-model/bundle", "resnet18.pth") for word in words]
        if words[0] == "kfp-ddp":
            answer = call(*words[1:], *(["--check"] if "--local" in words else []))
            assert answer.exit_code == 0, f"{words}: {answer.output}{answer.exception}"
        else:
            subprocess.run(words, check=True)


def test_a_merge_without_a_change_uploads_nothing(scene: KfpServer) -> None:
    Path("examples").symlink_to(EXAMPLES)
    steps = yaml.safe_load((EXAMPLES / "upload_on_merge.yaml").read_text())["jobs"]["upload"]
    runs = (shlex.split(step.get("run", "")) for step in steps["steps"])
    ours = list(filter(None, map(of_ours, runs)))
    assert [words[0] for words in ours] == ["compile", "upload"]
    for words in ours * 2:
        assert call(*words).exit_code == 0, words
    assert len(scene.store.versions) == 1


@pytest.mark.slow
def test_own_pipeline_is_compiled_and_runs(photographs: Path, tmp_path: Path) -> None:
    own = EXAMPLES / "own_pipeline.py"
    compiled = output("compile", own, "--directory", tmp_path, "--registry", "example.com/ml")
    assert compiled.split() == [str(tmp_path / "photographs.yaml")]
    assert "image: example.com/ml/trainer:" in (tmp_path / "photographs.yaml").read_text()
    settings = {"model": "cifar_resnet8", "image_size": 16, "epochs": 1, "workers": 0}
    arguments = {
        "source": str(photographs),
        "training": settings,
        "backend": "local",
        "job": {"nproc_per_node": 1},
        "least": 0.0,
    }
    done = pipeline(arguments, tmp_path, tmp_path / "photographs.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs(tmp_path, "verdict")["Output"] == "good"


def test_own_network_is_trained_and_loaded(photographs: Path, tmp_path: Path) -> None:
    words = ["--data", str(photographs), "--output-dir", str(tmp_path), "--image-size", "16"]
    words += ["--epochs", "1", "--workers", "0", "--learning-rate", "0.001"]
    assert rank.run(parse([*words, "--model", f"{EXAMPLES / 'own_model.py'}:build"]))
    checkpoint = newest_valid(tmp_path / "checkpoints")
    assert checkpoint is not None
    network, _ = load_model(checkpoint.path)
    assert type(network).__name__ == "Mixer"


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_program_waits_for_it(kfp_server: KfpServer, tmp_path: Path, state: str, code: int) -> None:
    package = ROOT / "compiled" / "train_resnet.yaml"
    program = [sys.executable, str(EXAMPLES / "client.py"), kfp_server.url, "gs://bucket/x"]
    home = {**os.environ, "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    with subprocess.Popen(
        [*program, package], stdout=subprocess.PIPE, text=True, env=home
    ) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.startswith("run "):
                kfp_server.put_run(line.split()[1], state, {"train": state})
                break
        end = threading.Timer(60, client.kill)  # only if it never ends
        end.start()
        output = client.stdout.read()
        end.cancel()
    assert client.returncode == code
    assert f"state {state}" in output
    assert ("failed train" in output) == bool(code)
    (request,) = kfp_server.requests_for("create_run")
    parameters = request.body["runtime_config"]["parameters"]
    assert parameters["training"] == {"image_size": 64}


@pytest.mark.parametrize("size", [32, 128])
def test_script_reads_as_we_do(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photograph, exif = tmp_path / "turned.jpg", Image.Exif()
    exif[0x112] = 6  # as of a camera that was held upright
    Image.radial_gradient("L").crop((0, 0, 250, 160)).convert("RGB").save(photograph, exif=exif)
    listed = tmp_path / "images.csv"
    listed.write_text(f"path,split,target\n{photograph},val,1\n")
    monkeypatch.setenv("KFP_DDP_IMAGES", str(listed))
    script = runpy.run_path(str(EXAMPLES / "own_script.py"))
    settings = {"image_size": size, "mean": [0, 0, 0], "std": [1, 1, 1]}
    seen, target = script["Images"]("val", settings)[0]
    expected = transforms.evaluate(image_files.read(str(photograph)), size)
    assert (seen * 255 - expected).abs().max() <= 2
    assert target == 1
