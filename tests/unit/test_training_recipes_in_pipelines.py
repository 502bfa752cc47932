"""A recipe is also the training of the `train` step."""

from typing import Any

import pytest

from kfp_ddp.base.settings import split
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_train_step(name: str) -> None:
    as_kfp_sends_it: dict[str, Any] = {
        key: float(value) if type(value) is int else value for key, value in RECIPES[name].items()
    }
    (given,) = split("training", as_kfp_sends_it, TrainConfig, own={})
    config = TrainConfig.create(data="/data", output_dir="/work", **given)
    assert {key: getattr(config, key) for key in RECIPES[name]} == RECIPES[name]
