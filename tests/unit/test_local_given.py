from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.base.errors import InputError
from kfp_ddp.local.given import merged, read


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("epochs=3", {"epochs": 3}),
        ("training.epochs=3", {"epochs": 3}),
        ("learning_rate=1e-2", {"learning_rate": 0.01}),
        ("model=resnet18", {"model": "resnet18"}),
        ("cache_gb=2", {"training": {"cache_gb": 2.0}}),
        ("training.deterministic=true", {"training": {"deterministic": True}}),
        ("cpu=2", {"job": {"cpu": "2"}}),
        ("include=*.jpg", {"sync": {"include": ["*.jpg"]}}),
        ("exclude=[a, b/**]", {"sync": {"exclude": ["a", "b/**"]}}),
        ("dataset=", {"sync": {"dataset": ""}}),
        ("gate={min_accuracy: 0.9}", {"gate": {"min_accuracy": 0.9}}),
    ],
)
def test_a_word_becomes_a_typed_argument_of_the_pipeline(
    word: str, arguments: dict[str, Any]
) -> None:
    assert read(None, [word]) == arguments


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("epoch=3", "there is no setting 'epoch'; did you mean 'epochs'?"),
        ("training.precison=bf16", "'training.precison'; did you mean 'precision'?"),
        ("trainng.epochs=3", "there is no 'trainng'; did you mean 'training'?"),
        ("training={colour: 1}", "there is no setting 'training.colour'"),
        ("epochs=ten", "epochs='ten' cannot be used: it should be a valid integer"),
        ("momentum=2", "momentum=2 cannot be used: it should be less than 1"),
        ("recipe=fintune", "did you mean 'finetune'?"),
        ("training=3", "training=3 cannot be used: it should be a valid dictionary"),
        ("epochs", "--set 'epochs' is no setting; write key=value, such as epochs=10"),
        ("output_dir=/tmp", "there is no setting 'output_dir'"),
    ],
)
def test_what_cannot_be_set_is_one_line(word: str, line: str) -> None:
    with pytest.raises(InputError) as refused:
        read(None, [word])
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_words_go_over_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("epochs: 30\ntraining: {seed: 1, cache_gb: 2}\nmin_accuracy: 0.9\n")
    assert read(file, ["seed=5", "epochs=2"]) == {
        "epochs": 2,
        "training": {"seed": 5, "cache_gb": 2.0},
        "gate": {"min_accuracy": 0.9},
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("epochs: [", "is not YAML"),
        ("- epochs", "holds no settings; write lines such as epochs: 10"),
        ("epoch: 3", "did you mean 'epochs'?"),
        ("epochs: many", "epochs='many' cannot be used"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as refused:
        read(file, [])
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_arguments_are_merged_setting_by_setting() -> None:
    under = {"epochs": 3, "training": {"seed": 1, "workers": 2}}
    over = {"model": "resnet18", "training": {"workers": 0}, "job": {"nproc_per_node": 1}}
    both = merged(under, over)
    assert (both["epochs"], both["model"]) == (3, "resnet18")
    assert both["training"] == {"seed": 1, "workers": 0}
    assert both["job"] == {"nproc_per_node": 1}
