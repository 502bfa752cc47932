"""Room for the batches of loader processes, and batches that cannot be sent."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kfp_ddp.core.errors import InputError
from kfp_ddp.training.data.loader import Batch, Images, Pixels, loader, to_device
from kfp_ddp.training.spec import shared_memory
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.recipes import configured
from kfp_ddp.training.spec.shared_memory import needed, prefetch_that_fits, size_of_pod

MB = 10**6
PIXELS = 3 * 100 * 100


def config(**fields: Any) -> TrainConfig:
    folders = {"data": "d", "output_dir": "o", "image_size": 100}
    return TrainConfig.create(**{**folders, "workers": 2, "micro_batch_size": 10, **fields})


def test_what_loaders_need() -> None:
    batch = 10 * PIXELS
    assert needed(config(), 10, 0) == 10 * batch
    assert needed(config(), 10, 3) == 13 * batch
    assert needed(config(), 10, 99) == needed(config(), 10, None) == 20 * batch
    assert needed(config(train_image_size=50), 10, 0, prefetch=1) == 4 * batch // 4
    assert needed(config(workers=0), 10, None) == 0


@pytest.mark.parametrize(
    ("fields", "ranks", "size"),
    [
        ({}, (1, 1), "2Gi"),
        ({"micro_batch_size": 0, "batch_size": 256, "image_size": 224}, (8, 8), "3Gi"),
        ({"micro_batch_size": "auto", "batch_size": 256, "image_size": 224}, (8, 8), "3Gi"),
        ({"micro_batch_size": 0, "batch_size_per_rank": 256, "image_size": 224}, (1, 1), "3Gi"),
        ({"micro_batch_size": 0, "batch_size_per_rank": 256, "image_size": 224}, (8, 64), "12Gi"),
    ],
)
def test_size_of_a_pod(fields: dict[str, Any], ranks: tuple[int, int], size: str) -> None:
    assert size_of_pod(config(**{**fields, "workers": 4}), *ranks) == size


def test_pods_of_a_large_recipe_have_more_than_its_training_batches() -> None:
    large = configured("imagenet-90", {"data": "d", "output_dir": "o"})
    assert int(size_of_pod(large, 8, 8).removesuffix("Gi")) * 2**30 > 4.9e9


def test_fewer_batches_wait_where_there_is_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    for prefetch in range(1, 5):
        free.free = 2 * needed(config(), 10, 1, prefetch)
        assert prefetch_that_fits(config(), 2, 1) == prefetch
    free.free = 2 * needed(config(), 10, 1, 1) - 1
    with pytest.raises(InputError, match=r"2 x 2 loader .*3 MB.*shm_size"):
        prefetch_that_fits(config(), 2, 1)
    assert prefetch_that_fits(config(workers=0), 2, 1) == shared_memory.PREFETCH


class _Unsendable(Images):
    """One batch of two cannot leave its process."""

    def __init__(self) -> None:
        pass

    def __getitems__(self, keys: list[Any]) -> Batch:
        unsendable: Any = lambda: None  # noqa: E731
        return Batch(torch.zeros(1, 3, 4, 4), keys, [unsendable] * keys[0], [], "")


def test_batch_that_cannot_be_sent_ends_the_training() -> None:
    ready = iter(loader(_Unsendable(), [[0], [1]], 1, False))
    batches = to_device(ready, torch.device("cpu"), Pixels())
    assert next(batches).images.shape == (1, 3, 4, 4)
    with pytest.raises(InputError, match=r"cannot send its images: .*shm_size"):
        next(batches)
