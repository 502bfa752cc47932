"""A recipe is also the training settings of the `train` step."""

from pathlib import Path

import pytest
import yaml
from kfp import compiler, dsl

from kfp_ddp.components.train.component import train
from kfp_ddp.training.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_train_step(name: str, tmp_path: Path) -> None:
    @dsl.pipeline(name="recipe")  # type: ignore[untyped-decorator]
    def recipe_pipeline() -> None:
        train(run_id="r", task_name="t", task_id="", dataset_path="/data", training=RECIPES[name])

    compiler.Compiler().compile(recipe_pipeline, str(tmp_path / "recipe.yaml"))
    compiled = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    given = compiled["root"]["dag"]["tasks"]["train"]["inputs"]["parameters"]
    assert given["training"]["runtimeValue"]["constant"] == RECIPES[name]
