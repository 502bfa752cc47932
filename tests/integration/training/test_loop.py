"""The loop on real ranks: recipes, strategies, bad data, faults of the disk, what it reports."""

import math
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from PIL import Image

from kfp_ddp.training.spec.recipes import configured
from kfp_ddp.training.state import checkpoint
from tests.serving import free_port
from tests.tolerance import assert_trained_alike
from tests.training_ranks import (
    Ranks,
    config,
    dataset,
    events,
    newest,
    output_of,
    state_hash,
    train_until_killed,
    trainer,
)
from tests.waiting import until

POLICY = Path(__file__).parents[3] / "deploy" / "network" / "jobs.yaml"
SMALL = dict[str, Any](epochs=2, batch_size=8, warmup_epochs=1, workers=0, device="cpu")
SMALLER: dict[str, dict[str, Any]] = {
    "none": {"model": "resnet18", "image_size": 32},
    "digits": {},
    "cifar": {"eval_epochs": 1, "checkpoint_epochs": 1},
    "imagenet-90": {"model": "resnet18", "image_size": 32},
    "imagenet-fast": {
        "model": "resnet18",
        "image_size": 48,
        "train_image_size": 40,
        "start_image_size": 32,
    },
    "finetune": {"model": "cifar_resnet8", "image_size": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_every_recipe_trains(name: str, tmp_path: Path) -> None:
    """All that makes a recipe one, on few small images and for the large ones a small network."""
    root = dataset(tmp_path / "data", train=24, val=6, size=20)
    extra: dict[str, Any] = {}
    if name == "finetune":
        four = dataset(tmp_path / "four", train=24, val=6, classes=4)
        first = config(four, tmp_path / "first", epochs=1, warmup_epochs=0, image_size=16)
        output_of(first, 1)
        extra = {"pretrained": str(tmp_path / "first" / "checkpoints" / "step-00000003")}
    folders = {"data": str(root), "output_dir": str(tmp_path / "run")}
    run = configured(name, {**folders, **SMALL, **SMALLER[name], **extra})
    output = output_of(run, 2)
    if name == "finetune":
        assert "a new classifier for 3 classes" in output
    last = newest(tmp_path / "run")
    network, info = checkpoint.load_model(last.path)
    assert network(torch.zeros(1, 3, info.image_size, info.image_size)).shape == (1, 3)
    assert len(events(tmp_path / "run", "eval")) == 2


ALL: dict[str, Any] = {
    "epochs": 2,
    "optimizer": "adamw",
    "sampling": "balanced",
    "mixup": 0.4,
    "cutmix": 1.0,
    "randaugment": 9,
    "freeze_epochs": 1,
    "body_lr_factor": 0.5,
    "keep_best": True,
    "early_stop_epochs": 2,
    "test_time_flip": True,
    "learning_rate": 0.002,
    "checkpoint_steps": 3,
}


@pytest.mark.slow
def test_run_killed_in_a_save_keeps_the_bits(tmp_path: Path) -> None:
    """While the body rests, so that it begins to learn once in one start, and once in each."""
    root = dataset(tmp_path / "data", train=32, val=8)  # four steps of 8 images an epoch
    fields = {**ALL, "ema_decay": 0.9}
    whole, parts = (config(root, tmp_path / name, **fields) for name in ("whole", "parts"))
    output_of(whole, 2)
    train_until_killed(parts, 2, "torch.save")
    assert "resumed from" in output_of(parts, 2)
    assert state_hash(parts) == state_hash(whole)


@pytest.mark.slow
def test_results_are_those_of_one_rank(tmp_path: Path) -> None:
    """Ranks share the micro-batches; 20 images to evaluate give shares of 20ths."""
    root = dataset(tmp_path / "data", train=48)
    losses, evaluated, weights = [], [], []
    more = {"micro_batch_size": 4, "optimizer": "sgd", "learning_rate": 0.05, "log_steps": 1}
    for world in (1, 3):
        run = config(root, tmp_path / str(world), **{**ALL, **more, "batch_size": 24})
        output_of(run, world)
        losses.append([event["loss"] for event in events(tmp_path / str(world), "step")])
        last = events(tmp_path / str(world), "eval")[-1]
        assert last["accuracy"] * 20 == pytest.approx(round(last["accuracy"] * 20))
        evaluated.append(last["loss"])
        assert newest(tmp_path / str(world)).step == 4
        weights.append(newest(tmp_path / str(world)).state()["model"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-2)
    assert_trained_alike(weights[1], weights[0])


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_network_is_saved_with_plain_names(data: Path, tmp_path: Path, world: int) -> None:
    run = config(
        data, tmp_path / "run", epochs=1, warmup_epochs=0, deterministic=False, compile=True
    )
    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs g++")
    output_of(run, world)
    checkpoint.load_model(tmp_path / "run" / "checkpoints" / "step-00000012")


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [100.0, 1e38])
def test_diverging_run_keeps_checkpoints(data: Path, tmp_path: Path, weight_decay: float) -> None:
    """The larger decay lets weights overflow in an update before any loss does, and at a save."""
    output, more = tmp_path / "run", {"warmup_epochs": 0, "checkpoint_steps": 1}
    good = config(data, output, epochs=1, **more)
    output_of(good, 2)
    wild = {"learning_rate": 10, "weight_decay": weight_decay, "log_steps": 5}
    message = output_of(config(data, output, **more, **wild), 2, code=1)
    assert "error: the loss became" in message or "error: after step" in message
    assert "the loss became NaN or infinite at step" in message
    assert "learning rate" in message
    assert ".png" in message
    last = newest(output)
    assert last.step >= 12
    state = last.state()["model"]
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.mark.slow
@pytest.mark.parametrize("cache_gb", [0.0, 0.1])
def test_broken_image_stops_all_ranks_or_is_counted(tmp_path: Path, cache_gb: float) -> None:
    root = dataset(tmp_path / "data")
    broken = sorted((root / "train" / "class1").iterdir())[7]
    broken.write_bytes(b"no image")
    fields: dict[str, Any] = {"cache_gb": cache_gb, "epochs": 2, "warmup_epochs": 0}
    fields |= {"cache_dir": str(tmp_path)}
    for more in ({}, {"verify_images": 0}):  # before the first epoch, and in it
        stopped = Ranks(config(root, tmp_path / "run", **fields, **more), 2)
        codes = stopped.wait()
        assert 2 in codes, stopped.output()
        assert broken.name in stopped.output()
    skipping = config(root, tmp_path / "skip", **fields, on_bad_image="skip", log_steps=12)
    output = output_of(skipping, 2)
    name = broken.relative_to(root).as_posix()
    assert f"1 of 116 images cannot be read and are skipped: {name}" in output
    (unreadable,) = events(tmp_path / "skip", "unreadable")
    assert (unreadable["images"], unreadable["files"]) == (1, [name])
    assert events(tmp_path / "skip", "step")[-1]["skipped_images"] == 1


def test_validation_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    root = dataset(tmp_path / "data", train=16, val=4)
    for path in (root / "val").rglob("*.png"):
        path.write_bytes(b"no image")
    fields: dict[str, Any] = {"on_bad_image": "skip", "epochs": 1, "warmup_epochs": 0}
    output = output_of(config(root, tmp_path / "run", **fields), 1, code=2)
    assert "error: none of the validation images can be read" in output


@pytest.mark.slow
def test_prometheus_profile_and_mfu(data: Path, tmp_path: Path) -> None:
    port = free_port()
    run = config(
        data,
        tmp_path / "run",
        epochs=2000,
        warmup_epochs=0,
        prometheus_port=port,
        profile_steps=2,
        peak_tflops=0.1,
    )
    ranks = Ranks(run, 1)
    ranks.wait_for("epoch 3/2000")
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    ranks.kill(0, 15)  # type: ignore[arg-type]
    assert ranks.wait() == [143]
    for name in ("step_loss", "step_images_per_s", "step_mfu", "eval_accuracy", "start_world_size"):
        assert f"kfp_ddp_{name} " in page
    assert list((tmp_path / "run" / "profile").glob("*.json*"))
    step = events(tmp_path / "run", "step")[-1]
    assert 0 < step["mfu"] < 1
    assert 0 <= step["data_wait_fraction"] <= 1
    assert math.isclose(step["images_per_s"], 8 / step["step_seconds"], rel_tol=1e-6)
    assert f"MFU {events(tmp_path / 'run', 'end')[0]['mfu'] * 100:.1f} %" in ranks.output()


@pytest.mark.slow
def test_images_are_counted_once_over_two_nodes(tmp_path: Path) -> None:
    """Each node has its cache; here both are on this machine, with one rank each."""
    root = dataset(tmp_path / "data")
    first = sorted((root / "train" / "class0").iterdir())[0]
    Image.open(first).convert("L").save(first)
    fields = {"epochs": 1, "warmup_epochs": 0, "cache_gb": 0.1, "cache_dir": str(tmp_path)}
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    output = output_of(config(root, tmp_path / "run", **fields), 2, env=node)
    assert "of 116 images checked, 1 are not RGB" in output


@pytest.mark.slow
def test_short_run_is_reported_and_a_completed_one_ends_at_once(data: Path, tmp_path: Path) -> None:
    """36 steps with a line each 50: the first and the last; then fewer epochs than were done."""
    run = config(data, tmp_path / "run", log_steps=50)
    output = output_of(run, 2)
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 36]
    assert output.count("step 36/36: loss ") == 1
    over = output_of(run.model_copy(update={"epochs": 2}), 2)
    assert "nothing to train: step 36 is saved and epochs=2 end at step 24" in over
    assert len(events(tmp_path / "run", "step")) == 2


@pytest.mark.slow
def test_ranks_save_in_an_epoch_and_listen_where_allowed(data: Path, tmp_path: Path) -> None:
    run = config(
        data, tmp_path / "run", epochs=5000, warmup_epochs=0, checkpoint_epochs=0
    ).model_copy(update={"checkpoint_minutes": 0.005})
    ranks = Ranks(run, 2)
    directory = tmp_path / "run" / "checkpoints"
    until(lambda: len(checkpoint.steps(directory)) >= 2, ranks.output, 60)
    listening = {
        connection.laddr.port
        for process in ranks.processes
        for connection in psutil.Process(process.pid).connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    ranks.kill(0, 15)  # type: ignore[arg-type]
    assert ranks.wait() == [143, 143]
    rule, *_ = yaml.safe_load(POLICY.read_text())["spec"]["ingress"]
    (peers,) = (range(one["port"], one["endPort"] + 1) for one in rule["ports"] if "endPort" in one)
    assert {ranks.port} < listening <= {ranks.port, *peers}


@pytest.mark.slow
def test_gradient_is_clipped_by_its_norm_over_all_ranks(tmp_path: Path) -> None:
    """One step of two ranks: at momentum 0.9 Nesterov's first step is 1.9 times the gradient."""
    root = dataset(tmp_path / "data", train=8, val=4, classes=2)
    plain = {"epochs": 1, "warmup_epochs": 0, "weight_decay": 0, "ema_decay": 0, "learning_rate": 1}
    run = config(root, tmp_path / "run", **plain, clip_norm=0.01)
    loop = trainer(config(root, tmp_path / "first"))
    loop.report.metrics.close()
    output_of(run, 2)
    clipped, _ = checkpoint.load_model(tmp_path / "run" / "checkpoints" / "step-00000001")
    first, last = (
        torch.cat([each.detach().flatten() for each in network.parameters()])
        for network in (loop.learner.network, clipped)
    )
    assert (last - first).norm() == pytest.approx(0.019, rel=1e-3)
