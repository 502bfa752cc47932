"""Settings that depend on data, ranks, recipe and checkpoint: batches, devices, recipes."""

import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.training import checkpoint, distributed, learner
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.distributed import World
from kfp_ddp.training.flags import parse
from kfp_ddp.training.prepare import resolve
from kfp_ddp.training.recipes import RECIPES, RecipeName, configured
from kfp_ddp.training.recipes import main as recipes_main
from tests.training_ranks import run

FOLDERS = {"data": "/d", "output_dir": "/o"}


def world(size: int) -> World:
    return World(0, size, 0, size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        ({"batch_size": 9}, 2, "batch_size=9 cannot be divided evenly among 2 ranks; use"),
        ({"batch_size": 12, "micro_batch_size": 4}, 2, "among 2 ranks with micro_batch_size=4"),
        ({"batch_size": 200}, 1, "batch_size=200 but only 96 training images"),
        ({"micro_batch_size": 64}, 2, "batch_size=128 but only 96 training images"),
        ({"batch_size": 8}, 97, "97 ranks but only 96 training images"),
        ({"strategy": "single", "batch_size": 8}, 2, "strategy=single but 2 ranks"),
    ],
)
def test_batch_that_cannot_be_divided_is_refused(
    tmp_path: Path, fields: dict[str, Any], ranks: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        resolve(run(tmp_path, **fields), world(ranks), 96)


def test_batch_per_rank_scales_the_rate_and_is_kept_on_resume(tmp_path: Path) -> None:
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
def test_default_batch_size_is_adapted_and_printed(
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
    assert (f"batch_size is {batch}, not 256" in capsys.readouterr().out) == (batch != 256)


def test_settings_that_are_not_set_stay_as_in_the_checkpoint(tmp_path: Path) -> None:
    """A version with other defaults, or another number of ranks, resumes with the same batches."""
    earlier = run(tmp_path, batch_size=64, epochs=20, warmup_epochs=5).model_copy(
        update={"micro_batch_size": 16}
    )
    manifest = checkpoint.manifest_of(earlier, ("a", "b"), epoch=1, world_size=4)
    checkpoint.write(tmp_path / "checkpoints", 5, {}, manifest)
    resolved = resolve(run(tmp_path, epochs=20), world(2), 96)
    batches = (resolved.batch_size, resolved.micro_batch_size, resolved.warmup_epochs)
    assert batches == (64, 16, 5)
    assert resolve(run(tmp_path, epochs=5), world(2), 96).warmup_epochs == 0.5
    changed = resolve(run(tmp_path, epochs=20, batch_size=32, warmup_epochs=1), world(2), 96)
    assert (changed.batch_size, changed.warmup_epochs) == (32, 1)


def test_elastic_run_allows_unequal_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(tmp_path, batch_size=32, micro_batch_size=8)
    with pytest.raises(InputError):
        resolve(config, world(3), 96)
    monkeypatch.setenv("KFP_DDP_ELASTIC", "1")
    assert resolve(config, world(3), 96).micro_batch_size == 8
    with pytest.raises(InputError, match="evenly among 3 ranks with micro_batch_size=8; use"):
        resolve(config.model_copy(update={"strategy": "fsdp"}), world(3), 96)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GPU"):
        distributed._device(run(tmp_path, device="cuda"), 0, 1, 1)
    assert distributed._device(run(tmp_path), 0, 4, 4).type == "cpu"


def test_recipes_are_complete_configurations() -> None:
    assert tuple(RECIPES) == typing.get_args(RecipeName)
    for name in RECIPES:
        configured(name, {**FOLDERS, "pretrained": "/c"})
        assert configured(name, {**FOLDERS, "pretrained": "/c", "epochs": 1}).epochs == 1
    assert configured("none", FOLDERS) == TrainConfig.create(**FOLDERS)
    for name, fields, words in (
        ("mnist", {}, "use one of auto, none, digits, cifar"),
        ("finetune", {"pretrained": False}, "needs initial weights"),
        ("digits", {"epochs": 1, "warmup_epochs": 2}, "warmup_epochs=2 leaves nothing of epochs=1"),
    ):
        with pytest.raises(InputError, match=words):
            configured(name, {**FOLDERS, **fields})


def test_initial_weights_are_fine_tuned_unless_another_recipe_is_set() -> None:
    fields = {**FOLDERS, "pretrained": "w"}
    tuned = configured("none", fields)
    assert (tuned.freeze_epochs, tuned.body_lr_factor, tuned.keep_best) == (1, 0.1, True)
    assert tuned == configured("finetune", fields)
    assert configured("cifar", fields).freeze_epochs == 0
    for random in ("auto", False, ""):
        assert configured("none", {**FOLDERS, "pretrained": random}).freeze_epochs == 0
    assert configured("finetune", FOLDERS).pretrained == "true"
    assert configured("none", {**FOLDERS, "init_from": "w"}) == tuned  # its former name


def test_another_optimizer_has_rates_of_its_own() -> None:
    adamw = configured("imagenet-90", {**FOLDERS, "optimizer": "adamw", "weight_decay": 0.05})
    assert (adamw.learning_rate, adamw.lr_reference_batch, adamw.weight_decay) == (1e-3, 0, 0.05)
    assert adamw.warmup_epochs == 8
    assert configured("imagenet-90", {**FOLDERS, "optimizer": "sgd"}).learning_rate == 0.256


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ("digits", {}),
        ("digits --epochs 4", {"epochs": 4}),  # fewer than the warm-up of no recipe
        ("imagenet-fast --no-blur-pool --epochs 90", {"blur_pool": False, "epochs": 90}),
        ("finetune --pretrained=/c", {"pretrained": "/c"}),
    ],
)
def test_recipe_is_printed_as_flags(
    flags: str, fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipes_main([*flags.split(), "--data", "/d", "--output-dir", "/o"]) == 0
    expected = configured(flags.split()[0], {**FOLDERS, **fields})
    config = parse(capsys.readouterr().out.split())
    assert config == expected
    assert config.model_fields_set == expected.model_fields_set


def test_value_that_a_shell_would_change_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes_main(["digits", "--data", "/a folder", "--output-dir", "/o"]) == 2
    assert "'/a folder' does not pass through a shell" in capsys.readouterr().err
    assert recipes_main(["digits", "--epocs", "3"]) == 2
    assert recipes_main(["mnist"]) == 2
