"""What is settled before the first step: batches, devices, rates, recipes."""

import json
import math
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.failure import Failure, read, report, root_cause
from kfp_ddp.training import checkpoint, distributed, learner, model
from kfp_ddp.training.config import TrainConfig, parse
from kfp_ddp.training.distributed import World
from kfp_ddp.training.initial_weights import initialise
from kfp_ddp.training.meter import peak_of
from kfp_ddp.training.prepare import resolve
from kfp_ddp.training.recipes import RECIPES, RecipeName, configured
from kfp_ddp.training.recipes import main as recipes_main


def run(output: Path, **fields: Any) -> TrainConfig:
    settings = {"data": "/d", "output_dir": str(output), "model": "cifar_resnet8"}
    return TrainConfig.create(**{**settings, **fields})


def world(size: int) -> World:
    return World(0, size, 0, size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        (
            {"batch_size": 9},
            2,
            "batch_size=9 cannot be divided evenly among 2 ranks; use a multiple",
        ),
        ({"batch_size": 12, "micro_batch_size": 4}, 2, "among 2 ranks with micro_batch_size=4"),
        ({"batch_size": 200}, 1, "batch_size=200 but only 96 training images"),
        ({"batch_size": 8}, 97, "97 ranks but only 96 training images"),
        ({"strategy": "single", "batch_size": 8}, 2, "strategy=single but 2 ranks"),
    ],
)
def test_a_batch_that_cannot_be_dealt_is_one_line(
    tmp_path: Path, fields: dict[str, Any], ranks: int, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolve(run(tmp_path, **fields), world(ranks), 96)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_for_each_rank_scales_the_rate_and_stays_on_resume(tmp_path: Path) -> None:
    config = run(tmp_path, batch_size_per_rank=8, lr_reference_batch=16, learning_rate=0.1)
    resolved = resolve(config, world(4), 96)
    assert (resolved.batch_size, resolved.micro_batch_size, resolved.precision) == (32, 8, "fp32")
    assert learner.peak(resolved) == pytest.approx(0.2)
    assert TrainConfig.from_json(resolved.to_json()) == resolved
    manifest = checkpoint.manifest_of(resolved, ("a", "b"), epoch=1, world_size=4)
    checkpoint.write(tmp_path / "checkpoints", 5, {}, manifest)
    fewer = resolve(config, world(2), 96)
    assert (fewer.batch_size, fewer.micro_batch_size) == (32, 8)


@pytest.mark.parametrize(
    ("fields", "ranks", "images", "batch", "micro"),
    [
        ({}, 1, 1000, 256, 256),
        ({}, 2, 97, 96, 48),
        ({}, 3, 1000, 255, 85),
        ({}, 5, 7, 5, 1),
        ({}, 512, 1000, 512, 1),
        ({"micro_batch_size": 10}, 2, 97, 80, 10),
        ({"micro_batch_size": 64}, 8, 1000, 512, 64),
    ],
)
def test_a_batch_size_that_nobody_set_fits_and_is_told(
    fields: dict[str, Any],
    ranks: int,
    images: int,
    batch: int,
    micro: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resolved = resolve(run(tmp_path, **fields), world(ranks), images)
    assert (resolved.batch_size, resolved.micro_batch_size) == (batch, micro)
    said = capsys.readouterr().out
    assert said.count("\n") == (batch != 256)
    assert (f"batch_size is {batch}, not 256" in said) == (batch != 256)


def test_a_micro_batch_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size=128 but only 96 training images"):
        resolve(run(tmp_path, micro_batch_size=64), world(2), 96)


def test_what_nobody_set_stays_as_in_the_checkpoint(tmp_path: Path) -> None:
    """A version with other defaults, or another number of ranks, goes on as the run began."""
    earlier = run(tmp_path, batch_size=64, epochs=20, warmup_epochs=5).model_copy(
        update={"micro_batch_size": 16}
    )
    manifest = checkpoint.manifest_of(earlier, ("a", "b"), epoch=1, world_size=4)
    checkpoint.write(tmp_path / "checkpoints", 5, {}, manifest)
    resolved = resolve(run(tmp_path, epochs=20), world(2), 96)
    kept = (resolved.batch_size, resolved.micro_batch_size, resolved.warmup_epochs)
    assert kept == (64, 16, 5)
    assert resolve(run(tmp_path, epochs=5), world(2), 96).warmup_epochs == 0.5
    given = resolve(run(tmp_path, epochs=20, batch_size=32, warmup_epochs=1), world(2), 96)
    assert (given.batch_size, given.warmup_epochs) == (32, 1)


def test_an_elastic_run_deals_unequal_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run(tmp_path, batch_size=32, micro_batch_size=8)
    with pytest.raises(InputError):
        resolve(config, world(3), 96)
    monkeypatch.setenv("KFP_DDP_ELASTIC", "1")
    assert resolve(config, world(3), 96).micro_batch_size == 8
    with pytest.raises(InputError, match="evenly among 3 ranks with micro_batch_size=8; use"):
        resolve(config.model_copy(update={"strategy": "fsdp"}), world(3), 96)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GPU"):
        distributed._device(run(tmp_path, device="cuda"), 0, 1, 1)
    assert distributed._device(run(tmp_path), 0, 4, 4).type == "cpu"


def test_the_rate_warms_up_and_falls_as_a_cosine(tmp_path: Path) -> None:
    config = run(tmp_path, epochs=10, warmup_epochs=2, learning_rate=0.4)
    rates = [learner.learning_rate(config, step, steps_per_epoch=5) for step in range(50)]
    assert rates[0] == pytest.approx(0.04)
    assert rates[9] == rates[10] == pytest.approx(0.4)
    assert rates[30] == pytest.approx(0.2)
    assert rates[49] == pytest.approx(0.2 * (1 + math.cos(math.pi * 39 / 40)))


def test_weight_decay_spares_norms_and_biases(tmp_path: Path) -> None:
    network = model.build("cifar_resnet8", 3)
    decayed, plain = learner.optimizer_of(network, run(tmp_path)).param_groups
    assert decayed["weight_decay"] > 0 == plain["weight_decay"]
    assert all(p.ndim > 1 for p in decayed["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(network.parameters()))


def test_averaged_weights_follow() -> None:
    network = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(network.weight)
    ema = learner.Ema(network, decay=0.5)
    torch.nn.init.ones_(network.weight)
    ema.update(step=1000)
    ema.update(step=1001)
    assert float(next(ema.model.parameters())) == pytest.approx(0.75)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "cifar_resnet14"])
def test_blur_pool_keeps_the_shape_and_the_weights(name: str) -> None:
    plain, blurred = model.build(name, 5), model.build(name, 5, blur_pool=True)
    assert blurred(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    shapes = [[tuple(p.shape) for p in network.parameters()] for network in (plain, blurred)]
    assert shapes[0] == shapes[1]
    assert sum(isinstance(m, model.BlurPool) for m in blurred.modules()) >= 2


def test_normalising_bytes_is_what_torchvision_does() -> None:
    images = torch.randint(256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = torch.tensor(model.MEAN).view(3, 1, 1), torch.tensor(model.STD).view(3, 1, 1)
    torch.testing.assert_close(model.normalise(images), (images / 255 - mean) / std)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="/nowhere is missing: give init_from"):
        initialise(
            model.build("cifar_resnet8", 2), run(tmp_path, init_from="/nowhere"), ("a", "b"), False
        )
    state = {"model": model.build("cifar_resnet14", 2).state_dict(), "ema": None}
    other = run(tmp_path, model="cifar_resnet14")
    path = checkpoint.write(
        tmp_path / "c", 1, state, checkpoint.manifest_of(other, ("a", "b"), epoch=1, world_size=1)
    )
    with pytest.raises(InputError, match="is a cifar_resnet14, not a cifar_resnet8"):
        initialise(
            model.build("cifar_resnet8", 2), run(tmp_path, init_from=str(path)), ("a", "b"), False
        )


def test_recipes_are_whole_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"data": "/d", "output_dir": "/o"}
    assert tuple(RECIPES) == typing.get_args(RecipeName)
    for name in RECIPES:
        configured(name, {**folders, "init_from": "/c"})
        assert configured(name, {**folders, "init_from": "/c", "epochs": 1}).epochs == 1
    assert configured("none", folders) == TrainConfig.create(**folders)
    with pytest.raises(InputError, match="use one of none, digits, cifar"):
        configured("mnist", folders)
    with pytest.raises(InputError, match="needs init_from"):
        configured("finetune", folders)
    with pytest.raises(InputError, match="warmup_epochs=2 leaves nothing of epochs=1"):
        configured("digits", {**folders, "epochs": 1, "warmup_epochs": 2})
    flags = ["--data", "/a folder", "--output-dir", "/o"]
    assert recipes_main(["digits", *flags]) == 2
    assert "'/a folder' does not pass through a shell" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("digits", {}),
        ("digits --epochs 4", {"epochs": 4}),  # fewer than the warm-up of no recipe
        ("imagenet-fast --no-blur-pool --epochs 90", {"blur_pool": False, "epochs": 90}),
        ("finetune --init-from=/c", {"init_from": "/c"}),
    ],
)
def test_a_shell_puts_the_flags_of_a_recipe_in(
    flags: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    module = f"{sys.executable} -m kfp_ddp.training.recipes {flags} --data /d --output-dir /o"
    show = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    shell = subprocess.run(
        ["sh", "-euc", f"{show} $({module})"], check=True, capture_output=True, cwd=tmp_path
    )
    wanted = configured(flags.split()[0], {"data": "/d", "output_dir": "/o", **fields})
    found = parse(json.loads(shell.stdout))
    assert found == wanted
    assert found.model_fields_set == wanted.model_fields_set


class _Failure:
    def __init__(self, code: int, at: float, text: str = "", consequence: bool = False) -> None:
        self.exitcode, self.timestamp = code, int(at)
        self.error_file_data: dict[str, Any] = {}
        if text:
            message = {"message": text, "extraInfo": {}}
            self.error_file_data = {"message": message, "time": at}
            self.error_file_data["consequence"] = consequence

    def signal_name(self) -> str:
        return "SIGKILL"


def test_the_root_cause_is_the_first_that_is_no_consequence() -> None:
    class Error:
        failures = {  # noqa: RUF012
            0: _Failure(1, 10.1, "RuntimeError: Connection closed by peer", consequence=True),
            1: _Failure(-15, 11.0),
            2: _Failure(1, 10.9, "ValueError: later"),
            3: _Failure(1, 10.5, "ValueError: first"),
        }

    found = root_cause(Error(), "kept")
    assert (found.rank, found.error, found.exit_code) == (3, "ValueError: first", 1)
    assert not found.retryable
    Error.failures = {0: Error.failures[0], 1: _Failure(-9, 10.0)}
    killed = root_cause(Error(), "kept")
    assert (killed.rank, killed.exit_code) == (1, 137)
    Error.failures = {0: _Failure(2, 10.0, "cannot read it")}
    assert not root_cause(Error(), "kept").retryable
    Error.failures[0].error_file_data["retryable"] = True
    assert root_cause(Error(), "kept").retryable
    Error.failures = {0: _Failure(143, 10.0), 1: _Failure(143, 11.0)}
    assert root_cause(Error(), "kept").error == "preempted; kept"


@pytest.mark.parametrize("letter", ["x", "é", "\N{SMILING FACE WITH SUNGLASSES}", '"'])
def test_a_long_error_stays_json_that_kubernetes_takes_whole(
    letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = tmp_path / "termination"
    monkeypatch.setenv("KFP_DDP_TERMINATION_LOG", str(message))
    failure = Failure(2, 0, f"it begins {letter * 5000} and ends", retryable=False)
    assert report(failure, tmp_path / "failure.json") == 2
    assert len(message.read_bytes()) <= 4096
    told = read(tmp_path)
    assert told is not None
    assert told.error.startswith("it begins")
    assert told.error.endswith("and ends")
    assert message.read_bytes() == (tmp_path / "failure.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 0),
        ("NVIDIA RTX A1000", 0),
        ("Tesla T4", 65),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
    ],
)
def test_the_peak_of_a_gpu_is_its_own(name: str, tflops: float) -> None:
    assert peak_of(name) == tflops
