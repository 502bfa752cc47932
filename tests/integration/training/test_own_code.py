"""A model and a script of one's own."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.pipelines.form import form_of
from kfp_ddp.training import own_script
from kfp_ddp.training.model import own_model
from kfp_ddp.training.prepare import prepare
from kfp_ddp.training.spec.config import TrainConfig, parse
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.checkpoint import load_model, newest_valid
from tests.photographs import plain
from tests.tolerance import assert_trained_alike
from tests.training_ranks import ALONE, config, dataset, newest, output_of, trainer

OWN = """
from torch import nn
from torchvision import transforms  # a module, and not what stands beside the network

def build(num_classes):
    features = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*features, *pool, nn.Linear(8, num_classes))
"""
BESIDE_NETWORK = OWN.replace("from torchvision import transforms", "")
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
    return dataset(tmp_path / "data", train=24, val=6)


def own(data: Path, output: Path, text: str = OWN, **fields: Any) -> TrainConfig:
    code = packed.pack(text.encode())
    more = {"epochs": 2, "warmup_epochs": 0, **fields}
    return config(data, output, model="mine.py:build", model_code=code, **more)


def weights(output: Path) -> dict[str, torch.Tensor]:
    last = newest(output)
    assert last.step == 6
    return checkpoint.load_model(last.path)[0].state_dict()


@pytest.mark.slow
def test_dropout_resumes_to_the_bit_and_on_two_ranks(data: Path, tmp_path: Path) -> None:
    assert trainer(own(data, tmp_path / "whole", micro_batch_size=4)).fit()
    stopped = trainer(own(data, tmp_path / "resumed", micro_batch_size=4))
    stopped.stop.ask("a test")
    assert not stopped.fit()
    torch.manual_seed(99)
    assert trainer(own(data, tmp_path / "resumed", micro_batch_size=4)).fit()
    output_of(own(data, tmp_path / "two", micro_batch_size=4), 2)
    whole, resumed, two = (weights(tmp_path / name) for name in ("whole", "resumed", "two"))
    assert len(whole) == 9
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    assert_trained_alike(two, whole)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def build(:", r"mine\.py, line 1: invalid syntax"),
        ("", r"mine\.py does not define build"),
        ("import nowhere_to_be_found\ndef build(n): ...", "ModuleNotFoundError in line 1: No mod"),
        ("build = 3", r"build in the model's file mine\.py is not a function"),
        ("import sys\nsys.exit(3)\ndef build(n): ...", "SystemExit in line 2: 3"),
        ("def build(): ...", r"mine\.py:build\(3\) raises TypeError"),
        ("def build(n):\n  return 1 / 0", r"mine.*raises ZeroDivisionError in line 2: division"),
        ("def build(n): ...", r"mine\.py:build\(3\) returns NoneType, not a torch\.nn\.Module"),
        (OWN.replace("(8, num_classes)", "(8, 7)"), r"gives \[2, 7\] for images of 8 px, not"),
        (OWN.replace("nn.Flatten()", "nn.ReLU()"), r"on images of 8 px raises RuntimeError"),
        (OWN.replace("*pool, nn.Linear(8, num_classes)", ""), r"gives \[2, 8, 4, 4\] for images"),
        (BESIDE_NETWORK + "def optimizer(n, c): return 3", "optimizer .* returns int, not a torch"),
        (BESIDE_NETWORK + "def optimizer(n): ...", r"optimizer in .* raises TypeError: .* takes 1"),
        (BESIDE_NETWORK + "def loss(a, b): return a", r"loss .* returns torch\.float32 \[2, 3\]"),
        (BESIDE_NETWORK + "def transforms(i, s, d): return i", r"returns torch\.uint8 \[3, 8"),
    ],
)
def test_unusable_file_is_one_line(data: Path, tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        prepare(own(data, tmp_path / "run", text), ALONE)
    assert len(str(caught.value)) < 400


def test_weight_that_the_logits_do_not_use_is_refused(data: Path, tmp_path: Path) -> None:
    text = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.used, self.unused = nn.Linear(3, classes), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x.mean((2, 3)))

build = Net
"""
    with pytest.raises(InputError, match=r"^unused\.weight is not used .* \(2 weights in all\)"):
        prepare(own(data, tmp_path / "run", text), ALONE)
    assert own_model.load_for(own(data, tmp_path / "run", text)) is not None


def test_file_of_the_command_line_is_packed_without_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    flags = ["--data", "/d", "--output-dir", "/o", "--model"]
    run = parse([*flags, f"{file}:build"])
    assert (run.model, run.model_code) == ("mine.py:build", packed.pack(OWN.encode()))
    assert parse(run.to_argv()) == run
    assert TrainConfig.create(**run.explicit()) == run
    (tmp_path / "weights.pth").touch()
    form = form_of("train_resnet").read(
        None, [f"model={file}:build", f"pretrained={tmp_path}/../{tmp_path.name}/weights.pth"]
    )
    assert form["pretrained"] == str(tmp_path / "weights.pth")
    (tmp_path / "old.yaml").write_text("init_from: w.pth\nbatch_size: 8\n")
    old = form_of("train_resnet").read(tmp_path / "old.yaml", [])
    assert old == {"pretrained": "w.pth", "training": {"batch_size": 8}}
    old = form_of("sweep").read(None, ["training.init_from=w.pth"])
    assert old == {"training": {"pretrained": "w.pth"}}
    (tmp_path / "old.yaml").write_text("pretrained: true\n")
    assert form_of("train_resnet").read(tmp_path / "old.yaml", []) == {"pretrained": "true"}
    assert form["training"]["model_code"] == packed.pack(OWN.encode())
    file.unlink()
    for model, line in (
        (f"{file}:build", r"^/.*/mine\.py cannot be packed: .*No such file"),
        (str(file), r"cannot be packed"),
    ):
        with pytest.raises(InputError, match=line):
            parse([*flags, model])
    file.write_text("#" * 70_000)
    with pytest.raises(InputError, match=r"into 93,362 bytes, and at most 87,410 .* the image$"):
        parse([*flags, f"{file}:build"])
    with pytest.raises(InputError, match=r"function of a file: write mine\.py:build"):
        TrainConfig.create(data="/d", output_dir="/o", model="mine.py")
    with pytest.raises(InputError, match="its text has to be in model_code"):
        TrainConfig.create(data="/d", output_dir="/o", model="mine.py:build")
    with pytest.raises(InputError, match="is not a function of a file"):
        TrainConfig.create(data="/d", output_dir="/o", model="resnet18", model_code="x")
    with pytest.raises(InputError, match="is not a packed Python file"):
        TrainConfig.create(data="/d", output_dir="/o", model="a.py:b", model_code="data:x")


BESIDE = """
import torch
import torch.nn.functional as F

def optimizer(network, config):
    head, body = list(network[6].parameters()), list(network[:6].parameters())
    groups = {"params": head, "lr": config.learning_rate}, {"params": body, "lr": 0.005}
    return torch.optim.Adam(groups, betas=(0.5, 0.9))

def loss(logits, targets):
    return F.multi_margin_loss(logits, targets)

def transforms(image, size, draw):
    shade = image.max() if draw.random() < 0.5 else image.min()
    return shade.expand(3, size, size)
"""


def test_optimizer_loss_and_transforms_are_used_and_resume(data: Path, tmp_path: Path) -> None:
    text = BESIDE_NETWORK + BESIDE
    stopped = trainer(own(data, tmp_path / "resumed", text))
    stopped.stop.ask("a test")
    assert not stopped.fit()
    resumed = trainer(own(data, tmp_path / "resumed", text))
    assert resumed.fit()
    optimizer = resumed.learner.optimizer
    assert isinstance(optimizer, torch.optim.Adam)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.9)] * 2
    resumed.learner.set_rate(0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.005])
    logits, targets = torch.tensor([[1.0, 2.0, 0.0]], requires_grad=True), torch.tensor([0])
    assert float(resumed.loss(logits, targets).detach()) == pytest.approx(2 / 3)
    uninterrupted = trainer(own(data, tmp_path / "whole", text))
    images = next(uninterrupted.batches()).images
    assert torch.equal(images, images[:, :, :1, :1].expand_as(images))  # of one shade each
    assert uninterrupted.fit()
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(value, whole[n]) for n, value in weights(tmp_path / "resumed").items())


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    return plain(tmp_path / "data", 12, 8)


def settings(data: Path, text: str, **more: Any) -> dict[str, Any]:
    given = {"data": str(data), "output_dir": str(data.parent / "run"), "image_size": 8}
    code = packed.pack(text.encode())
    return {**given, "epochs": 3, "model": "mine.py:build", "script": code, **more}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (own_script.IMAGES, own_script.CONFIG, own_script.OUTPUT):
        monkeypatch.setenv(name, "")


def test_script_gets_inputs_and_is_saved(
    photographs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = settings(photographs, SAVES, val_fraction=0.25, script_args="--depth 3 'two fields'")
    config = parse(TrainConfig.create(**fields).to_argv())
    assert own_script.run(config)
    folder = RunFolder(fields["output_dir"])
    argv, epochs, classes, rows = json.loads((folder.path / "inputs").read_text())
    assert (argv, epochs, classes) == (["--depth", "3", "two fields"], 3, ["dark", "light"])
    assert {row["path"] for row in rows} == {str(path) for path in photographs.glob("*/*")}
    assert {(row["class"], row["target"]) for row in rows} == {("dark", "0"), ("light", "1")}
    checkpoint = newest_valid(folder.checkpoints)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.fields["metrics"]) == (12, {"accuracy": 0.75})
    assert checkpoint.fields["config"]["val_fraction"] == 0.25  # whoever evaluates splits alike
    network, info = load_model(checkpoint.path)
    assert bool((network.state_dict()["1.weight"] == 0.25).all())
    assert info.classes == ("dark", "light")
    for rank in ("0", "1"):  # all ranks of a retried step return: none waits for another
        monkeypatch.setenv("RANK", rank)
        (folder.path / "inputs").unlink(missing_ok=True)
        assert own_script.run(config)
        assert ("nothing to train" in capfd.readouterr().out) == (rank == "0")
        assert not (folder.path / "inputs").exists()
    monkeypatch.setenv("RANK", "0")
    assert own_script.run(TrainConfig.create(**fields, resume="never", run_id="again"))
    assert (folder.path / "checkpoints.old-0").is_dir()
    assert (folder.path / "inputs").exists()


def test_stale_heartbeat_ends_a_script(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(own_script, "Heartbeat", lambda file, seconds, stop: calls.append(stop))
    monkeypatch.setattr(own_script, "end_for_good", lambda: calls.append("for good"))
    monkeypatch.setattr(os, "_exit", calls.append)
    fields = settings(photographs, SAVES, stop_when_stale="/heartbeat")
    assert own_script.run(TrainConfig.create(**fields))
    calls.pop()()
    assert calls == ["for good", 143]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (SMALL, InputError, "the script saved no weights"),
        (SMALL + "    sys.exit(7)\n", JobError, "the script ended with 7"),
        (SMALL + "    raise ValueError('no')\n", ValueError, "no"),
        (SAVES.replace("= build(2)", "= build(3)"), InputError, "does not fit mine.py:build: "),
        (SAVES.replace("0.75", "'much'"), InputError, "in result.json must be numbers"),
        (SMALL.replace("Linear(3", "Linear(4"), InputError, "build on images of 8 px raises"),
    ],
)
def test_script_error(photographs: Path, text: str, error: type[Exception], words: str) -> None:
    fields = settings(photographs, text)
    with pytest.raises(error, match=re.escape(words)):
        own_script.run(TrainConfig.create(**fields))
    assert newest_valid(RunFolder(fields["output_dir"]).checkpoints) is None


def test_stopped_script_can_be_resumed(photographs: Path) -> None:
    fields = settings(photographs, SMALL + "    sys.exit(143)\n")
    assert not own_script.run(TrainConfig.create(**fields))
    fields["script"] = settings(photographs, SAVES)["script"]
    assert own_script.run(TrainConfig.create(**fields))


def test_file_of_the_command_line_is_packed(photographs: Path) -> None:
    file = photographs.parent / "mine.py"
    file.write_text(SAVES)
    flags = ["--data", "/d", "--output-dir", "/o", "--script", str(file)]
    config = parse([*flags, "--model", "mine.py:build"])
    assert config.script == config.model_code == packed.pack(SAVES.encode())
    assert "--model-code" not in config.to_argv()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"script": "print(1)"}, "is not a packed Python file"),
        ({"script_args": "'open"}, 'script_args="\'open" cannot be split: No closing quotation'),
        ({"model": "mine.py:other"}, "mine.py does not define other"),
        ({"script": packed.pack(b"x = (")}, "script, line 1: '(' was never closed"),
    ],
)
def test_invalid_script_is_never_run(photographs: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        TrainConfig.create(**settings(photographs, SMALL, **more))
