"""A recipe is also the training inputs of the `train` step."""

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
        train(run_id="r", dataset_path="/data", work_dir="/work", **RECIPES[name])

    compiler.Compiler().compile(recipe_pipeline, str(tmp_path / "recipe.yaml"))
    compiled = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    given = compiled["root"]["dag"]["tasks"]["train"]["inputs"]["parameters"]
    values = {key: value["runtimeValue"]["constant"] for key, value in given.items()}
    assert {key: values[key] for key in RECIPES[name]} == RECIPES[name]
