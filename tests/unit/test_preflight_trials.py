"""What preflight makes of a sweep and of a script, before a byte moves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.core import packed

SCRIPT = packed.pack(b"def build(num_classes): ...")


def plan(tmp_path: Path, **given: Any) -> Any:
    summary = SimpleNamespace(path=str(tmp_path / "summary.md"), metadata={})
    source = tmp_path / "photographs"
    source.mkdir(exist_ok=True)
    return preflight.python_func(plan_summary=summary, source=str(source), backend="local", **given)


def test_each_trial_has_its_settings_over_those_that_all_have(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        recipe="digits",
        epochs=9,
        training={"momentum": 0.8},
        sweep={"trials": [{"learning_rate": 0.3, "epochs": 2}, {"momentum": 0.7}]},
    )
    first, second = found.trials
    assert (first["learning_rate"], first["epochs"], first["momentum"]) == (0.3, 2, 0.8)
    assert (second["learning_rate"], second["epochs"], second["momentum"]) == (0.2, 9, 0.7)
    assert {each["model"] for each in found.trials} == {"cifar_resnet8"}
    assert {each["stop_behind_epochs"] for each in found.trials} == {1}
    assert not {"data", "output_dir"} & set(first)
    assert "stop_behind_epochs" not in found.training
    kept = plan(
        tmp_path,
        training={"stop_behind_epochs": 5, "batch_size": 18},  # which has no box in this form
        sweep={"space": {"learning_rate": [0.1, 0.2]}, "stop_behind_epochs": 0},
    )
    assert {each["stop_behind_epochs"] for each in kept.trials} == {5}
    assert {each["batch_size"] for each in kept.trials} == {18}


def test_without_a_sweep_there_are_no_trials(tmp_path: Path) -> None:
    assert plan(tmp_path).trials == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"sweep": {"space": {"learning_rat": [0.1, 0.2]}}},
            "a trial of sweep has no setting 'learning_rat'; did you mean 'learning_rate'?",
        ),
        (
            {"sweep": {"space": {"learning_rate": [0.1, -1]}}},
            'the trial {"learning_rate": -1} of sweep: learning_rate=-1 cannot be used',
        ),
        ({"sweep": {"spaces": {}}}, "sweep has no setting 'spaces'; did you mean 'space'?"),
        (
            {"sweep": {"trials": [{"output_dir": "/"}, {"epochs": 2}]}},
            "a trial of sweep sets output_dir, which the step sets itself",
        ),
        ({"sweep": {"samples": 65}}, "samples=65 cannot be used"),
        ({"script": "train.py"}, "script='train.py'... is not a packed Python file in UTF-8"),
        (
            {"script": SCRIPT, "model": "train.py:make"},
            "train.py does not define make: add a function make(num_classes)",
        ),
        (
            {"script": SCRIPT, "training": {"script": SCRIPT}},
            "training sets script, which is a parameter of the form",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit) as error:
        plan(tmp_path, **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_script_travels_once_also_where_it_has_the_network(tmp_path: Path) -> None:
    found = plan(tmp_path, script=SCRIPT, model="train.py:build").training
    assert (found["script"], found["model"]) == (SCRIPT, "train.py:build")
    assert "model_code" not in found
