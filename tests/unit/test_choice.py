from typing import Any

import pytest

from kfp_ddp.checks.choice import MINUTES, Choice, Machine, Photographs, choose
from kfp_ddp.checks.form import SUBJECTS
from kfp_ddp.training.config import TrainConfig

OLD = Machine(cores=2, memory_gb=8, device="cpu", gpus=0)
NEW = Machine(cores=12, memory_gb=32, device="cpu", gpus=0)
APPLE = Machine(cores=8, memory_gb=16, device="mps", gpus=1)
GAMING = Machine(cores=8, memory_gb=32, device="cuda", gpus=1)


def photographs(images: int, short_side: int = 1000) -> Photographs:
    return Photographs(train=images, val=images // 10, classes=3, short_side=short_side)


def size(choice: Choice) -> int:
    found: int = choice.arguments["training"]["image_size"]
    return found


@pytest.mark.parametrize("machine", [OLD, NEW, APPLE, GAMING], ids=str)
@pytest.mark.parametrize("images", [3, 60, 500, 5_000, 200_000])
def test_what_is_chosen_can_train(machine: Machine, images: int) -> None:
    choice = choose(photographs(images), machine, {})
    arguments = choice.arguments
    boxes = {
        name: value
        for name, value in arguments.items()
        if name in TrainConfig.model_fields and name not in SUBJECTS
    }
    TrainConfig.create(data="-", output_dir="-", **boxes, **arguments["training"])
    assert arguments["batch_size"] % choice.ranks == 0
    assert arguments["batch_size"] <= max(images, choice.ranks)
    assert arguments["job"]["nproc_per_node"] == choice.ranks
    assert 0 < choice.minutes <= 2 * MINUTES or arguments["epochs"] == 3


def test_more_machine_takes_larger_images_and_more_images_smaller_ones() -> None:
    assert size(choose(photographs(1_000), OLD, {})) < size(choose(photographs(1_000), GAMING, {}))
    assert size(choose(photographs(50_000), NEW, {})) < size(choose(photographs(1_000), NEW, {}))


def test_small_images_are_not_enlarged() -> None:
    assert size(choose(photographs(500, short_side=28), GAMING, {})) == 128, "the smallest there is"
    assert size(choose(photographs(500, short_side=28), NEW, {})) == 32


def test_memory_limits_the_ranks() -> None:
    small = Machine(cores=12, memory_gb=4, device="cpu", gpus=0)
    assert choose(photographs(500), small, {}).ranks == 2
    assert choose(photographs(500), NEW, {}).ranks == 4
    assert choose(photographs(500), NEW, {}, ranks=3).ranks == 3


def test_few_images_have_one_rank_and_no_batch_of_one() -> None:
    choice = choose(photographs(24), NEW, {})
    assert (choice.ranks, choice.arguments["batch_size"]) == (1, 8)


def test_an_apple_gpu_has_one_rank_alone() -> None:
    choice = choose(photographs(500), APPLE, {})
    training = choice.arguments["training"]
    assert (choice.ranks, training["device"], training["strategy"]) == (1, "mps", "single")


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 7},
        {"model": "efficientnet_b0"},
        {"model": "cifar_resnet8", "training": {"image_size": 24}},
        {"batch_size": 5, "training": {"learning_rate": 0.2}},
        {"gate": {"min_accuracy": 0.9}, "job": {"nproc_per_node": 1}},
        {"training": {"cache_gb": 0.0, "log_steps": 1}},
    ],
)
def test_what_was_given_stays(given: dict[str, Any]) -> None:
    arguments = choose(photographs(500), NEW, given).arguments
    for name, value in given.items():
        if name in SUBJECTS:
            assert arguments[name].items() >= value.items()
        else:
            assert arguments[name] == value


def test_a_box_that_is_left_as_the_form_has_it_is_chosen() -> None:
    left = {"model": "auto", "epochs": 0, "batch_size": 0}
    assert choose(photographs(500), NEW, left) == choose(photographs(500), NEW, {})


def test_weights_to_begin_with_are_fine_tuned() -> None:
    given = {"training": {"init_from": "bundle"}}
    arguments = choose(photographs(500), NEW, given).arguments
    assert arguments["recipe"] == "finetune"
    assert "model" not in arguments
    assert "learning_rate" not in arguments["training"]
