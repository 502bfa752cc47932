"""What preflight tells of the pipelines beside train_resnet, before a byte moves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.checks.form import description
from kfp_ddp.components.preflight.component import preflight
from tests.gcs_server import Bucket

GOOD: dict[str, Any] = {"source": "gs://bucket/ds", "backend": "local"}


@pytest.fixture
def summary(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(tmp_path / "summary.md"), metadata={})


def check(summary: SimpleNamespace, **given: Any) -> Any:
    return preflight.python_func(plan_summary=summary, **{**GOOD, **given})


def test_a_checkpoint_in_a_bucket_is_looked_for_and_nothing_is_said_of_a_training(
    bucket: Bucket, summary: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put("models/cats/CHAMPION", b"x")
    check(summary, checkpoint="gs://bucket/models/cats", split="test")
    said = "evaluation of gs://bucket/models/cats on test, nothing is trained"
    assert summary.metadata["what"] == said
    assert "warning" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="checkpoint=gs://bucket/models/dogs is not found"):
        check(summary, checkpoint="gs://bucket/models/dogs")


def test_weights_to_begin_with_have_a_box_of_their_own_where_the_form_has_one(
    bucket: Bucket, summary: SimpleNamespace
) -> None:
    bucket.put("weights.pth", b"x")
    weights = "gs://bucket/weights.pth"
    plan = check(summary, recipe="finetune", init_from=weights, epochs=3)
    assert (plan.training["init_from"], plan.training["epochs"]) == (weights, 3)
    assert check(summary, training={"init_from": weights}).training["init_from"] == weights
    with pytest.raises(SystemExit, match="training sets init_from, which is"):
        check(summary, init_from=weights, training={"init_from": weights})
    with pytest.raises(SystemExit, match="the recipe finetune needs init_from"):
        check(summary, recipe="finetune", init_from="")
    with pytest.raises(SystemExit, match=r"init_from=gs://bucket/none[.]pth is not"):
        check(summary, recipe="finetune", init_from="gs://bucket/none.pth")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"keep": -1}, "keep=-1 cannot be used"),
        ({"champion": "last"}, "champion=last is the last model at destination, which is empty"),
        ({"checkpoint": "gs:/bucket/models"}, "checkpoint='gs:/bucket/models' is not an address"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    given: dict[str, Any], line: str, summary: SimpleNamespace
) -> None:
    with pytest.raises(SystemExit) as raised:
        check(summary, **given)
    assert str(raised.value).startswith(f"error: {line}")
    assert "\n" not in str(raised.value)


def test_a_box_that_is_asked_for_has_no_recipe_to_stand_for() -> None:
    assert "as the recipe has it" not in description("init_from")
    assert description("model").endswith("auto: as the recipe has it.")
