"""`evaluate_checkpoint` with a network and weights of one's own, which no run of ours trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor, nn

from kfp_ddp.training.model.networks import build, normalise
from tests import photographs
from tests.commands import call, document, refused

NET = """
from torch import nn


def build(num_classes):
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


def wide(num_classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes + 1))


def crash(num_classes):
    raise RuntimeError("no layers")
"""
SIZE = 32
State = dict[str, Tensor]
EVALUATE = (
    "run",
    "photos",
    "--local",
    "--pipeline",
    "evaluate_checkpoint",
    "--set",
    "image_size=32",
)


def trained(function: str = "build", classes: int = 2) -> nn.Module:
    """Return a network of NET that tells dark pictures from light ones, or an untrained one."""
    torch.manual_seed(0)
    module: dict[str, Any] = {}
    exec(NET, module)
    network: nn.Module = module[function](classes)
    shades = torch.tensor([52, 212], dtype=torch.uint8).repeat(16)
    images = normalise(shades.view(-1, 1, 1, 1).expand(-1, 3, SIZE, SIZE))
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(network(images), torch.tensor([0, 1]).repeat(16)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with pictures, the file of the network and its weights."""
    monkeypatch.chdir(tmp_path)
    photographs.plain(tmp_path / "photos", 24, SIZE)
    (tmp_path / "net.py").write_text(NET)
    torch.save(trained().state_dict(), "mine.pt")
    return tmp_path


def words(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_weights_are_evaluated_judged_exported_and_published(place: Path, judged: bool) -> None:
    """With names of classes that the pictures lack; without a verdict there is a bundle, too."""
    torch.save({"epoch": 3, "state_dict": trained(classes=3).state_dict()}, "mine.pth")
    (place / "names.txt").write_text("dark\nlight\nnight\n")
    own: dict[str, Any] = {
        "checkpoint": "mine.pth",
        "model": "net.py:build",
        "classes": "names.txt",
    }
    if judged:
        own["min_accuracy"] = 0.6  # so few pictures are too few for the rule of everybody
    own |= {"destination": place / "models", "model_name": "shades"}
    done = call(*EVALUATE, "--output", "out", *words(**own))
    assert done.exit_code == 0, done.output
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["accuracy"], summary["blessed"]) == (1.0, judged)
    assert Path(summary["report"]).is_file()
    assert "loss_curve" not in summary
    bundle = Path(summary["bundle"])
    assert json.loads((bundle / "classes.json").read_text()) == ["dark", "light", "night"]
    assert (place / "models" / "shades" / "CHAMPION").is_file() == judged
    config = json.loads((bundle / "config.json").read_text())["training"]
    assert "learning_rate" not in config, "how it was trained is not known"
    picture = next(place.glob("photos/light/*"))
    (row,) = document("predict", bundle, picture, "--allow-code")["pictures"]
    assert row["classes"][0]["class"] == "light"


def check(**settings: Any) -> str:
    return refused(*EVALUATE, "--check", *words(**settings))


MODEL = {"model": "net.py:build"}


@pytest.mark.parametrize(
    ("change", "settings", "line"),
    [
        (lambda: torch.save(trained(), "mine.pt"), MODEL, "contains more than weights"),
        (
            lambda: torch.save(trained(classes=3).state_dict(), "mine.pt"),
            MODEL,
            "[3, 8], not [2, 8]",
        ),
        (lambda: torch.save({"x": 1}, "mine.pt"), MODEL, "it contains no tensors"),
        (lambda: Path("mine.pt").write_bytes(b"weights"), MODEL, "no readable weights"),
        (lambda: None, {"model": "net.py:crash"}, "net.py:crash(2) raises RuntimeError in line 15"),
        (lambda: None, {"model": "resnet18"}, "does not fit resnet18: "),
        (lambda: None, {**MODEL, "classes": "[a, b, c]"}, "[2, 8], not [3, 8]"),
        (lambda: None, {**MODEL, "classes": "no.txt"}, "'no.txt' is neither a file"),
        (lambda: None, {**MODEL, "classes": "[a, a]"}, "classes names one of them twice"),
        (lambda: None, {}, "training sets image_size"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(
    place: Path, change: Callable[[], object], settings: dict[str, str], line: str
) -> None:
    change()
    before = sorted(place.iterdir())
    assert line in check(checkpoint="mine.pt", **settings)
    run = refused(*EVALUATE, *words(checkpoint="mine.pt", **settings))
    assert line in run
    assert sorted(place.iterdir()) == before


def test_missing_weights_and_logits_of_another_shape_are_named(place: Path) -> None:
    state = trained().state_dict()
    del state["0.weight"]
    torch.save(state, "mine.pt")
    assert "0.weight is missing" in check(checkpoint="mine.pt", **MODEL)
    module: dict[str, Any] = {}
    exec(NET, module)
    torch.save(module["wide"](2).state_dict(), "mine.pt")
    wide = {"model": "net.py:wide"}
    assert "not logits [2, 2]" in check(checkpoint="mine.pt", **wide)
    plain = [*words(checkpoint="mine.pt"), "--check"]
    assert "name its network" in refused(*EVALUATE[:5], *plain)


def test_named_network_and_safetensors_fit(place: Path) -> None:
    """Also by the classes that the file itself names, more than the pictures have."""
    network = build("cifar_resnet8", 3)
    names = json.dumps(["dark", "light", "night"])
    save_file(network.state_dict(), "mine.safetensors", metadata={"classes": names})
    given = words(checkpoint="mine.safetensors", model="cifar_resnet8")
    settings = document(*EVALUATE, "--check", *given)["settings"]
    assert settings["checkpoint"] == str(place / "mine.safetensors")


@pytest.mark.parametrize("name", ["wide", "crash"])
def test_training_names_the_fault_of_a_network_at_once(name: str) -> None:
    error = refused("run", "photos", "--local", "--check", *words(model=f"net.py:{name}"))
    assert f"net.py:{name}" in error
    assert {"wide": "not logits [2, 2]", "crash": "line 15: no layers"}[name] in error
