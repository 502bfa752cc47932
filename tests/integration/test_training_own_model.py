"""A network of a user's file: its functions, its checks and its resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError
from kfp_ddp.pipelines.form import form_of
from kfp_ddp.training import checkpoint, model_file, own_model
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.flags import parse
from kfp_ddp.training.prepare import prepare
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
        if "num_batches" not in name:  # counts those of rank 0
            torch.testing.assert_close(value, two[name], msg=name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def build(:", r"mine\.py, line 1: invalid syntax"),
        ("import torch", r"mine\.py does not define build: add a function build\(num_classes\)"),
        ("", r"mine\.py does not define build"),
        ("import nowhere_to_be_found\ndef build(n): ...", "ModuleNotFoundError in line 1: No mod"),
        ("build = 3", r"build in the model's file mine\.py is not a function"),
        ("loss = 3\ndef build(n): ...", r"loss in the model's file mine\.py is not a function"),
        ("import sys\nsys.exit(3)\ndef build(n): ...", "SystemExit in line 2: 3"),
        ("def build(): ...", r"mine\.py:build\(3\) raises TypeError"),
        ("def build(n):\n  return 1 / 0", r"mine.*raises ZeroDivisionError in line 2: division"),
        ("def build(n): ...", r"mine\.py:build\(3\) returns NoneType, not a torch\.nn\.Module"),
        (OWN.replace("(8, num_classes)", "(8, 7)"), r"gives \[2, 7\] for two images of 8 px, not"),
        (OWN.replace("nn.Flatten()", "nn.ReLU()"), r"on images of 8 px raises RuntimeError"),
        (OWN.replace("*pool, nn.Linear(8, num_classes)", ""), r"gives \[2, 8, 4, 4\] for two"),
        (
            BESIDE_NETWORK + "def optimizer(n, c): return 3",
            r"optimizer in mine\.py returns int, not a torch\.optim",
        ),
        (
            BESIDE_NETWORK + "def optimizer(n): ...",
            r"optimizer in mine\.py raises TypeError: optimizer\(\) takes 1",
        ),
        (
            BESIDE_NETWORK + "def loss(a, b): return a",
            r"loss in mine\.py returns torch\.float32 \[2, 3\], not",
        ),
        (
            BESIDE_NETWORK + "def loss(a, b): return a[5, 5]",
            r"loss in mine\.py raises IndexError in line 9",
        ),
        (
            BESIDE_NETWORK + "def transforms(i, s, d): return i",
            r"in mine\.py returns torch\.uint8 \[3, 8",
        ),
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
    assert (run.model, model_file.unpack(run.model_code)) == ("mine.py:build", OWN)
    assert parse(run.to_argv()) == run
    assert TrainConfig.create(**run.given()) == run
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
    assert model_file.unpack(form["training"]["model_code"]) == OWN
    file.unlink()
    for model, line in (
        (f"{file}:build", r"^cannot read the model /.*/mine\.py: No such file"),
        (str(file), r"cannot read the model"),
    ):
        with pytest.raises(InputError, match=line):
            parse([*flags, model])
    file.write_text("#" * 70_000)
    with pytest.raises(InputError, match="has 70,000 bytes, 65,536 are allowed"):
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
    logits, targets = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0])
    assert float(resumed.loss(logits, targets)) == pytest.approx(2 / 3)
    uninterrupted = trainer(own(data, tmp_path / "whole", text))
    images = next(uninterrupted.batches()).images
    assert torch.equal(images, images[:, :, :1, :1].expand_as(images))  # of one shade each
    assert uninterrupted.fit()
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(value, whole[n]) for n, value in weights(tmp_path / "resumed").items())
