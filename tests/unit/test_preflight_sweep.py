import pytest

from kfp_ddp.checks.sweep import MAX_TRIALS, Sweep, trials_of
from kfp_ddp.core.errors import InputError


def test_lists_give_all_combinations_besides_explicit_trials() -> None:
    sweep = Sweep.create(
        space={"learning_rate": [0.1, 0.2], "model": ["resnet18", "resnet34"]},
        trials=[{"epochs": 3}, {"learning_rate": 0.1, "model": "resnet18"}],
    )
    assert trials_of(sweep) == [
        {"epochs": 3},
        {"learning_rate": 0.1, "model": "resnet18"},
        {"learning_rate": 0.1, "model": "resnet34"},
        {"learning_rate": 0.2, "model": "resnet18"},
        {"learning_rate": 0.2, "model": "resnet34"},
    ]


def test_samples_are_in_their_ranges_and_reproducible() -> None:
    space = {
        "learning_rate": {"min": 0.001, "max": 0.1, "log": True},
        "label_smoothing": {"min": 0, "max": 0.2},
        "epochs": {"min": 2, "max": 9},
        "optimizer": ["sgd", "adamw"],
    }
    trials = trials_of(Sweep.create(space=space, samples=40))
    assert len(trials) == 40
    assert all(0.001 <= trial["learning_rate"] <= 0.1 for trial in trials)
    low = sum(trial["learning_rate"] < 0.01 for trial in trials)
    assert 10 <= low <= 30, "half of the draws by logarithm"
    assert all(0 <= trial["label_smoothing"] <= 0.2 for trial in trials)
    assert {type(trial["epochs"]) for trial in trials} == {int}
    assert {trial["epochs"] for trial in trials} == set(range(2, 10))
    assert {trial["optimizer"] for trial in trials} == {"sgd", "adamw"}
    assert trials_of(Sweep.create(space=space, samples=40)) == trials
    assert trials_of(Sweep.create(space=space, samples=40, seed=1)) != trials


@pytest.mark.parametrize(
    ("sweep", "reason"),
    [
        ({}, "sweep has 0 trials, and 2 to 64 can be tried"),
        ({"space": {"epochs": [1, 1]}}, "sweep has 1 trials"),
        (
            {"space": {"seed": [*range(MAX_TRIALS + 1)]}},
            "65 combinations, and 64",
        ),
        ({"samples": 4}, "sweep sets samples, but no space to draw them from"),
        ({"space": {"epochs": {"min": 1, "max": 3}}}, "epochs is a range: set samples"),
        ({"space": {"epochs": 3}}, "epochs=3 should be a list of values"),
        (
            {"samples": 2, "space": {"learning_rate": {"min": 0.1, "max": 0.01}}},
            "learning_rate={'min': 0.1, 'max': 0.01} is not a range",
        ),
    ],
)
def test_invalid_sweep_is_an_error(sweep: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError) as error:
        trials_of(Sweep.create(**sweep))
    assert reason in str(error.value)
