"""The trials of a sweep, from lists, ranges and explicit settings."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings
from kfp_ddp.training.config import TrainConfig

MAX_TRIALS = 64
"""Each trial is a pod and a job."""

Trial = dict[str, Any]


class Sweep(Settings):
    """A sweep: the settings of a trial override those of the training."""

    space: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training by name, each with a list of values, such as {"learning_rate":
    [0.05, 0.1]}, or with a range, such as {"min": 0.001, "max": 0.1, "log": true}."""
    trials: tuple[dict[str, Any], ...] = ()
    """Explicit trials, each a mapping of settings, besides those of space."""
    samples: int = Field(0, ge=0, le=MAX_TRIALS)
    """Number of random trials from space; 0 for all combinations of its lists."""
    seed: int = Field(0, ge=0)
    """Seed of random trials."""
    stop_behind_epochs: int = Field(1, ge=0)
    """From this epoch on, a trial ends when its best accuracy is below the median of the others at
    that epoch; 0: never."""


def trials_of(sweep: Sweep) -> list[Trial]:
    """Return the settings of each trial, without duplicates; InputError if too many or few."""
    trials = [*map(dict, sweep.trials)]
    if sweep.samples:
        trials += _drawn(sweep)
    elif sweep.space:
        choices = [_choices(name, values) for name, values in sweep.space.items()]
        number = math.prod(map(len, choices))
        if number > MAX_TRIALS:
            raise InputError(
                f"sweep: space has {number} combinations, and {MAX_TRIALS} can be tried: "
                "set samples to draw some of them, or shorten its lists"
            )
        combinations = itertools.product(*choices)
        trials += [dict(zip(sweep.space, values, strict=True)) for values in combinations]
    different = list({json.dumps(trial, sort_keys=True): trial for trial in trials}.values())
    if not 2 <= len(different) <= MAX_TRIALS:
        raise InputError(
            f"sweep has {len(different)} trials, and 2 to {MAX_TRIALS} can be tried: "
            'set space, such as {"learning_rate": [0.05, 0.1]}, or trials'
        )
    return different


def _drawn(sweep: Sweep) -> Iterator[Trial]:
    if not sweep.space:
        raise InputError("sweep sets samples, but no space to draw them from")
    draw = random.Random(sweep.seed)
    for _ in range(sweep.samples):
        yield {name: _draw(name, values, draw) for name, values in sweep.space.items()}


def _choices(name: str, values: Any) -> Sequence[Any]:
    if isinstance(values, list | tuple) and values:
        return values
    if isinstance(values, Mapping):
        raise InputError(f"sweep: {name} is a range: set samples, how many trials are drawn")
    raise InputError(f"sweep: {name}={values!r} should be a list of values")


def _draw(name: str, values: Any, draw: random.Random) -> Any:
    """Draw from a list or a range; integers if the setting and both ends are integers."""
    if not isinstance(values, Mapping):
        return draw.choice(_choices(name, values))
    low, high = values.get("min", math.nan), values.get("max", math.nan)
    by_log = values.get("log", False)
    numbers = all(isinstance(end, int | float) for end in (low, high))
    unknown = set(values) - {"min", "max", "log"}
    if not numbers or not low < high or (by_log and low <= 0) or unknown:
        raise InputError(
            f"sweep: {name}={dict(values)!r} is not a range: write "
            '{"min": 0.001, "max": 0.1, "log": true}, min below max, and above 0 with log'
        )
    whole = all(float(end).is_integer() for end in (low, high))
    integers = whole and getattr(TrainConfig.model_fields.get(name), "annotation", None) is int
    if integers and not by_log:
        return draw.randint(int(low), int(high))
    first, last = (math.log(low), math.log(high)) if by_log else (low, high)
    value = draw.uniform(first, last)
    value = math.exp(value) if by_log else value
    return round(value) if integers else float(f"{value:.3g}")
