"""A user's training script instead of the loop."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training import own_script
from kfp_ddp.training.checkpoint import load_model, newest_valid
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.flags import parse

SMALL = """
import csv, json, os, sys, torch
from pathlib import Path
def build(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, num_classes))
if __name__ == "__main__":
    config = json.loads(Path(os.environ["KFP_DDP_CONFIG"]).read_text())
    rows = list(csv.DictReader(Path(os.environ["KFP_DDP_IMAGES"]).read_text().splitlines()))
    output = Path(os.environ["KFP_DDP_OUTPUT"])
    inputs = [sys.argv[1:], config["epochs"], config["classes"], rows]
    (output / "inputs").write_text(json.dumps(inputs))
"""
SAVES = (
    SMALL
    + """
    network = build(2)
    torch.nn.init.constant_(network[1].weight, 0.25)
    torch.save({f"module.{n}": t for n, t in network.state_dict().items()}, output / "model.pt")
    (output / "result.json").write_text(json.dumps({"step": 12, "accuracy": 0.75}))
"""
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        for number in range(12):
            path = tmp_path / "data" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            shade = 200 if label == "cat" else 10
            Image.new("RGB", (8, 8), (shade, number, number)).save(path)
    return tmp_path / "data"


def settings(data: Path, text: str, **more: Any) -> dict[str, Any]:
    given = {"data": str(data), "output_dir": str(data.parent / "run"), "image_size": 8}
    code = packed.pack(text.encode())
    return {**given, "epochs": 3, "model": "mine.py:build", "script": code, **more}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (own_script.IMAGES, own_script.CONFIG, own_script.OUTPUT):
        monkeypatch.setenv(name, "")


def test_script_gets_inputs_and_is_saved(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fields = settings(data, SAVES, val_fraction=0.25, script_args="--depth 3 'two fields'")
    config = parse(TrainConfig.create(**fields).to_argv())
    assert own_script.run(config)
    folder = RunFolder(fields["output_dir"])
    argv, epochs, classes, rows = json.loads((folder.path / "inputs").read_text())
    assert (argv, epochs, classes) == (["--depth", "3", "two fields"], 3, ["cat", "dog"])
    assert {row["path"] for row in rows} == {str(path) for path in data.glob("*/*")}
    assert {(row["class"], row["target"]) for row in rows} == {("cat", "0"), ("dog", "1")}
    checkpoint = newest_valid(folder.checkpoints)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.manifest["metrics"]) == (12, {"accuracy": 0.75})
    assert checkpoint.manifest["config"]["val_fraction"] == 0.25  # whoever evaluates splits alike
    network, info = load_model(checkpoint.path)
    assert bool((network.state_dict()["1.weight"] == 0.25).all())
    assert info.classes == ("cat", "dog")
    assert own_script.run(config)
    assert "nothing to train" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (
            SMALL,
            InputError,
            "the script saved no weights",
        ),
        (SMALL + "    sys.exit(7)\n", JobError, "the script ended with 7"),
        (SMALL + "    raise ValueError('no')\n", ValueError, "no"),
        (
            SAVES.replace("network = build(2)", "network = build(3)"),
            InputError,
            "model.pt do not fit a mine.py:build (size mismatch for 1.weight",
        ),
        (SAVES.replace("0.75", "'much'"), InputError, "in result.json must be numbers"),
        (
            SMALL.replace("Linear(3", "Linear(4"),
            InputError,
            "model=mine.py:build on images of 8 px raises",
        ),
    ],
)
def test_script_error_is_named(data: Path, text: str, error: type[Exception], words: str) -> None:
    fields = settings(data, text)
    with pytest.raises(error, match=re.escape(words)):
        own_script.run(TrainConfig.create(**fields))
    assert newest_valid(RunFolder(fields["output_dir"]).checkpoints) is None


def test_stopped_script_can_be_resumed(data: Path) -> None:
    fields = settings(data, SMALL + "    sys.exit(143)\n")
    assert not own_script.run(TrainConfig.create(**fields))
    fields["script"] = settings(data, SAVES)["script"]
    assert own_script.run(TrainConfig.create(**fields))


def test_file_of_the_command_line_is_packed(data: Path) -> None:
    file = data.parent / "mine.py"
    file.write_text(SAVES)
    flags = ["--data", str(data), "--output-dir", str(data.parent / "run"), "--script", str(file)]
    config = parse([*flags, "--model", "mine.py:build"])
    assert config.script == config.model_code == packed.pack(SAVES.encode())
    assert "--model-code" not in config.to_argv()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"script": "print(1)"}, "is not a packed Python file"),
        ({"script_args": "'open"}, 'script_args="\'open" cannot be split: No closing quotation'),
        ({"script": "", "model": "resnet18", "script_args": "x"}, "no script takes them"),
        ({"model": "mine.py:other"}, "mine.py does not define other"),
        (
            {"script": packed.pack(b"x = (")},
            "script, line 1: '(' was never closed: correct the file",
        ),
    ],
)
def test_invalid_script_is_never_run(data: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        TrainConfig.create(**settings(data, SMALL, **more))
    assert words in str(error.value)
