"""The settings of a sweep, and the trials that follow from its lists and ranges."""

import contextlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings, rename
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.recipes import RecipeName

if TYPE_CHECKING:
    import optuna

MAX_TRIALS = 1000
"""Each trial is a folder and one or more jobs."""

Trial = dict[str, Any]


class Sweep(Settings):
    """A sweep: the settings of a trial override those of the training."""

    set_by_step: ClassVar[frozenset[str]] = frozenset({"recipe", "rates"})

    space: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training by name, each with a list of values, such as {"learning_rate":
    [0.05, 0.1]}, or with a range, such as {"min": 0.001, "max": 0.1, "log": true}."""
    trials: tuple[dict[str, Any], ...] = ()
    """Explicit trials, each a mapping of settings, besides those of space."""
    samples: int = Field(0, ge=0, le=MAX_TRIALS)
    """Number of trials that are drawn from space; 0 for all combinations of its lists, or with a
    budget for as many as it allows."""
    sampler: Literal["auto", "grid", "random", "tpe"] = "auto"
    """How trials are taken from space: grid, all combinations of its lists; random; tpe, near the
    settings that were good so far (Bergstra et al. 2011, by Optuna); auto: random with samples,
    otherwise grid."""
    seed: int = Field(0, ge=0)
    """Seed of trials that are drawn."""
    parallel_trials: int = Field(4, ge=1, le=64)
    """Trials that train at the same time, each as a job; with backend=local one."""
    reduction_factor: int = Field(0, ge=0, le=100)
    """Successive halving (Li et al. 2018, ASHA): of the trials at each rung the best one in this
    many goes on, from its checkpoint; 0: all train to their last epoch."""
    min_epochs: int = Field(1, ge=1)
    """Epochs to the first rung of the halving; to each next one reduction_factor times as many."""
    max_gpu_hours: float = Field(0.0, ge=0)
    """Hours of all ranks of all trials, GPU-hours where there are GPUs, after which no other
    training starts; 0: no limit."""
    max_minutes: float = Field(0.0, ge=0)
    """Minutes after which no other training starts; 0: no limit."""
    recipe: RecipeName = "none"
    """Recipe of the trainings."""
    rates: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Defaults of a trial's settings by its optimizer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.reduction_factor == 1:
            raise ValueError("reduction_factor=1 ends no trial: give 0, or 2 or more")
        return self

    @property
    def timed(self) -> bool:
        """Whether the sweep has a budget of time."""
        return bool(self.max_gpu_hours or self.max_minutes)

    @property
    def draws(self) -> int:
        """Number of trials that are drawn from space at most; 0 for a grid."""
        grid = self.sampler == "grid" or (self.sampler == "auto" and not self.samples)
        if grid:
            return 0
        # Without a number, the budget ends the sweep.
        most = MAX_TRIALS - len(self.trials) if self.timed else 0
        return self.samples or most

    def under(self, optimizer: str) -> dict[str, Any]:
        """Return the defaults of a trial with this optimizer."""
        return dict(self.rates.get(optimizer, {}))

    def rungs(self, epochs: int) -> list[int]:
        """Return the epochs at which a training of `epochs` is compared; its last one included."""
        rungs = []
        rung = self.min_epochs
        while self.reduction_factor and rung < epochs:
            rungs.append(rung)
            rung *= self.reduction_factor
        return [*rungs, epochs]

    def share(self, epochs: int) -> float:
        """Return the part of its epochs that a trial trains on average: the halving ends others."""
        trained = 0.0
        before = 0
        for level, rung in enumerate(self.rungs(epochs)):
            trained += (rung - before) / max(1, self.reduction_factor) ** level
            before = rung
        return trained / epochs


def listed(sweep: Sweep) -> list[Trial]:
    """Return the explicit trials and the grid, without duplicates; raise InputError."""
    trials = [_typed_settings(trial) for trial in sweep.trials]
    if sweep.space and not sweep.draws:
        trials += _grid(sweep)
    unique = {key_of(trial): trial for trial in trials}
    return list(unique.values())


def _typed_settings(trial: Trial) -> Trial:
    return {name: _typed(name, value) for name, value in trial.items()}


def _typed(name: str, value: Any) -> Any:
    """Return a value in the type of its setting, as YAML reads 1e-3 as text.

    It stays as it is if there is no such setting or it is invalid, which fails with its trial.
    """
    (field,) = rename({name: None}, TrainConfig)
    with contextlib.suppress(LookupError, InputError):
        return TrainConfig.checked(field, value)
    return value


def _grid(sweep: Sweep) -> list[Trial]:
    """Return all combinations of the lists of a space; raise InputError for too many."""
    if sweep.sampler in ("random", "tpe"):
        raise InputError(
            f"sweep sets sampler={sweep.sampler}: set samples, how many trials are drawn, or "
            "max_gpu_hours or max_minutes"
        )
    choices = [_choices(name, values) for name, values in sweep.space.items()]
    number = math.prod(map(len, choices))
    if number > MAX_TRIALS:
        raise InputError(
            f"sweep: space has {number} combinations, and {MAX_TRIALS} can be tried: "
            "set samples to draw some of them, or shorten its lists"
        )
    return [dict(zip(sweep.space, row, strict=True)) for row in itertools.product(*choices)]


def key_of(trial: Trial) -> str:
    """Return the text that is equal for equal trials."""
    return json.dumps(trial, sort_keys=True)


def number_of(sweep: Sweep) -> int:
    """Return how many trials there are at most; raise InputError if too many or few."""
    if sweep.draws and not sweep.space:
        raise InputError("sweep sets samples, but no space to draw them from")
    number = len(listed(sweep)) + sweep.draws
    if not 2 <= number <= MAX_TRIALS:
        raise InputError(
            f"sweep has {number} trials, and 2 to {MAX_TRIALS} can be tried: "
            'set space, such as {"learning_rate": [0.05, 0.1]}, or trials'
        )
    return number


def examples_of(sweep: Sweep) -> list[Trial]:
    """Return all trials of a grid; where trials are drawn, each value and end of a range once."""
    number_of(sweep)
    examples = listed(sweep)
    if not sweep.draws:
        return examples
    ends: dict[str, Sequence[Any]] = {}
    for name, values in sweep.space.items():
        if isinstance(values, Mapping):
            low, high, _, _ = _range(name, values)
            ends[name] = (low, high)
        else:
            ends[name] = _choices(name, values)
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        examples += [{**first, name: value} for value in values]
    return examples


def draw(trial: "optuna.trial.Trial", name: str, values: Any) -> Any:
    """Return the value of a setting that a trial of Optuna proposes; raise InputError."""
    if not isinstance(values, Mapping):
        return trial.suggest_categorical(name, _choices(name, values))
    low, high, log, integers = _range(name, values)
    if integers:
        return trial.suggest_int(name, int(low), int(high), log=log)
    return trial.suggest_float(name, low, high, log=log)


def rounded(value: float, low: float, high: float) -> float:
    """Return a value of a range with three digits of it or of the width, whichever is finer."""
    size = max(min(abs(value), high - low), 1e-300)
    digits = 2 - math.floor(math.log10(size))
    return min(max(round(value, digits), low), high)


def _choices(name: str, values: Any) -> list[Any]:
    if isinstance(values, list | tuple) and values:
        typed = [_typed(name, value) for value in values]
        for value in typed:
            if typed.count(value) > 1:
                raise InputError(f"sweep: {name} has {value!r} twice: keep one of them")
        return typed
    if isinstance(values, Mapping):
        raise InputError(f"sweep: {name} is a range: set samples, how many trials are drawn")
    raise InputError(f"sweep: {name}={values!r} should be a list of values")


def _range(name: str, values: Mapping[str, Any]) -> tuple[float, float, bool, bool]:
    """Return the ends, whether by logarithm, and whether setting and ends are integers."""
    low = _typed(name, values.get("min", math.nan))
    high = _typed(name, values.get("max", math.nan))
    by_log = values.get("log", False)
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    ordered = numbers and low < high
    no_log = ordered and by_log and low <= 0
    if not ordered or no_log or values.keys() - {"min", "max", "log"}:
        raise InputError(
            f"sweep: {name}={dict(values)!r} is not a range: write "
            '{"min": 0.001, "max": 0.1, "log": true}, min below max, and above 0 with log'
        )
    field = TrainConfig.model_fields.get(name)
    whole = float(low).is_integer() and float(high).is_integer()
    integers = whole and field is not None and field.annotation is int
    if integers:
        low = int(low)
        high = int(high)
    return low, high, bool(by_log), integers
