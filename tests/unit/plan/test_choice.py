from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kfp_ddp.models.weights_download import MOST_IMAGES, RANDOM_START, Start
from kfp_ddp.plan.choice import Choice, Machine, Photographs, choose, count_gpus
from kfp_ddp.plan.form import SUBJECTS
from kfp_ddp.plan.sizing import choose_weights
from kfp_ddp.training.spec.config import TrainConfig

OLD = Machine(cores=2, memory_gb=8, device="cpu", gpus=0)
NEW = Machine(cores=12, memory_gb=32, device="cpu", gpus=0)
APPLE = Machine(cores=8, memory_gb=16, device="mps", gpus=1)
GAMING = Machine(cores=8, memory_gb=32, device="cuda", gpus=1)
JOB = Machine(cores=16, memory_gb=0, device="cuda", gpus=2, pods=2)
MACHINES = [OLD, NEW, APPLE, GAMING, JOB]


def photographs(images: int, short_side: int = 1000, decoding: float = 0.002) -> Photographs:
    return Photographs(images, images // 10, 3, short_side, decoding)


def size(choice: Choice) -> int:
    return int(choice.arguments["training"]["image_size"])


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("images", [3, 60, 500, 5_000, 200_000])
def test_what_is_chosen_can_train(machine: Machine, images: int, weights: bool) -> None:
    choice = choose(photographs(images), machine, {}, weights=weights)
    arguments = choice.arguments
    boxes = {
        name: value
        for name, value in arguments.items()
        if name in TrainConfig.model_fields and name not in SUBJECTS
    }
    TrainConfig.create(data="-", output_dir="-", **boxes, **arguments["training"])
    assert arguments["training"]["batch_size"] % choice.ranks == 0
    assert arguments["training"]["batch_size"] <= max(images, choice.ranks)
    assert machine.pods or arguments["job"]["nproc_per_node"] == choice.ranks
    assert 0 < choice.minutes <= 1.1 * machine.minutes or arguments["epochs"] <= 3
    assert not weights or images < 32 or arguments["training"]["batch_size"] <= images / 8
    assert choice.why


HARDWARE = st.builds(
    Machine,
    cores=st.integers(1, 256),
    memory_gb=st.floats(1, 2000),
    device=st.sampled_from(["cpu", "cuda", "mps"]),
    gpus=st.integers(1, 64),
    pods=st.integers(0, 8),
)


def find(_: str, model: str, images: int) -> Start:
    """Return the weights of a network, as where they can always be had."""
    return Start("true", model) if images < MOST_IMAGES else RANDOM_START


@settings(deadline=None, derandomize=True)
@example(OLD, [44_000, 46_000], 300, 0.002, True)  # with as many to validate
@given(
    HARDWARE,
    st.lists(st.integers(1, 3_000_000), min_size=2, max_size=2).map(sorted),
    st.integers(0, 5000),
    st.floats(0.0001, 1),
    st.booleans(),
)
def test_more_images_never_have_fewer_pixels(
    machine: Machine, counts: list[int], short_side: int, decoding: float, weights: bool
) -> None:
    few, many = (
        choose(photographs(count, short_side, decoding), machine, {}, weights=weights)
        for count in counts
    )
    auto = (
        choose_weights(photographs(count, short_side, decoding), machine, {}, 0, find)[0]
        for count in counts
    )
    assert size(next(auto)) <= size(next(auto))
    assert size(few) <= size(many)
    assert size(few) >= 64 or 0 < short_side < 64
    assert few.arguments["epochs"] >= many.arguments["epochs"]


def test_more_hardware_has_more_pixels_and_slow_decoding_fewer_epochs() -> None:
    assert size(choose(photographs(1_000), OLD, {})) < size(choose(photographs(1_000), GAMING, {}))
    quick, slow = (choose(photographs(6_000, 3_000, s), OLD, {}) for s in (0.002, 0.06))
    assert quick.arguments["epochs"] > slow.arguments["epochs"]
    assert size(quick) == size(slow)
    fast, slow = (choose(photographs(500), replace(NEW, core_speed=s), {}) for s in (1, 0.5))
    assert slow.arguments["epochs"] < fast.arguments["epochs"] or size(slow) < size(fast)


@pytest.mark.parametrize("machine", MACHINES[1:], ids=str)
@pytest.mark.parametrize(("short_side", "expected"), [(28, 32), (50, 48), (64, 64), (100, 96)])
def test_small_images_are_not_enlarged(machine: Machine, short_side: int, expected: int) -> None:
    assert size(choose(photographs(500, short_side), machine, {})) == expected


def test_memory_images_and_an_apple_gpu_limit_the_ranks() -> None:
    small = Machine(cores=12, memory_gb=4, device="cpu", gpus=0)
    assert choose(photographs(500), small, {}).ranks == 2
    assert choose(photographs(500), NEW, {}).ranks == 4
    assert choose(photographs(500), NEW, {}, ranks=3).ranks == 3
    few, apple = choose(photographs(24), NEW, {}), choose(photographs(500), APPLE, {})
    assert (few.ranks, few.arguments["training"]["batch_size"]) == (1, 8)
    assert (apple.ranks, apple.arguments["training"]["strategy"]) == (1, "single")
    assert choose(photographs(500), NEW, {"training": {"strategy": "single"}}).ranks == 1


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,-1,1", 1)]
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int) -> None:
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == gpus


@pytest.mark.parametrize(
    "requested",
    [
        {"model": "efficientnet_b0"},
        {"model": "cifar_resnet8", "training": {"image_size": 24}},
        {"training": {"batch_size": 5, "learning_rate": 0.2}},
        {"gate": {"min_accuracy": 0.9}, "job": {"nproc_per_node": 1}},
        {"epochs": 3},
    ],
)
def test_what_was_requested_stays(requested: dict[str, Any]) -> None:
    choice = choose(photographs(500), NEW, requested)
    arguments = choice.arguments
    assert not ("epochs" in requested and "epochs" in choice.why)
    for name, value in requested.items():
        if name in SUBJECTS:
            assert arguments[name].items() >= value.items()
        else:
            assert arguments[name] == value
    training = TrainConfig.create(data="-", output_dir="-", **arguments["training"])
    assert training.ema_decay > 0


def test_images_seen_often_are_augmented() -> None:
    few, many = (choose(photographs(count), OLD, {}).arguments for count in (500, 20_000))
    assert few["epochs"] > many["epochs"]
    assert few["training"]["randaugment"] > many["training"]["randaugment"] == 0
    steps = few["epochs"] * (500 // few["training"]["batch_size"])
    assert few["training"]["ema_decay"] == pytest.approx(1 - 1 / (0.07 * steps), abs=1e-5)


def test_boxes_that_are_left_are_chosen_and_weights_fine_tuned() -> None:
    left = {"recipe": "auto", "model": "auto", "epochs": 0, "pretrained": "auto"}
    assert choose(photographs(500), NEW, left) == choose(photographs(500), NEW, {})
    arguments = choose(photographs(500), NEW, {"pretrained": "bundle"}).arguments
    assert arguments["recipe"] == "finetune"
    assert "learning_rate" not in arguments["training"]


def test_a_chosen_batch_and_rate_suit_what_was_requested() -> None:
    def chosen(**training: Any) -> dict[str, Any]:
        return dict(choose(photographs(500), NEW, {"training": training}).arguments["training"])

    assert chosen(micro_batch_size=3)["batch_size"] % 12 == 0
    assert chosen(micro_batch_size="auto") == {**chosen(), "micro_batch_size": "auto"}
    assert chosen(batch_size_per_rank=2)["learning_rate"] == chosen(batch_size=8)["learning_rate"]
    assert "learning_rate" not in chosen(optimizer="adamw")
