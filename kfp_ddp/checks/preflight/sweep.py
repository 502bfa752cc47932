"""The trials of a sweep: which settings each has, from lists, ranges and what is written out."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings

MOST = 64
"""Trials of one sweep, each of which is a pod and a job."""

Trial = dict[str, Any]


class Sweep(Settings):
    """What is tried; each trial has settings of the training over those that all have."""

    space: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training by name, each with a list of what to try, such as {"learning_rate":
    [0.05, 0.1]}, or with a range, such as {"min": 0.001, "max": 0.1, "log": true}."""
    trials: tuple[dict[str, Any], ...] = ()
    """Trials written out, each a mapping of settings, besides those of space."""
    samples: int = Field(0, ge=0, le=MOST)
    """Trials drawn at random from space; 0 for all combinations of its lists."""
    seed: int = Field(0, ge=0)
    """Seed of what is drawn."""
    stop_behind_epochs: int = Field(1, ge=0)
    """A trial ends, from this epoch on, when its best accuracy is below the median of what others
    had by then; 0: never."""


def trials_of(sweep: Sweep) -> list[Trial]:
    """The settings of each trial, no two the same.

    Raises:
        InputError: there are none, too many, or some that cannot be drawn.
    """
    found = [*map(dict, sweep.trials)]
    if sweep.samples:
        found += _drawn(sweep)
    elif sweep.space:
        choices = [_choices(name, values) for name, values in sweep.space.items()]
        number = math.prod(map(len, choices))
        if number > MOST:
            raise InputError(
                f"sweep: space has {number} combinations, and {MOST} can be tried: set samples to "
                "draw some of them, or shorten its lists"
            )
        found += [dict(zip(sweep.space, each, strict=True)) for each in itertools.product(*choices)]
    different = list({json.dumps(each, sort_keys=True): each for each in found}.values())
    if not 2 <= len(different) <= MOST:
        raise InputError(
            f"sweep has {len(different)} trials, and 2 to {MOST} can be tried: set space, such as "
            '{"learning_rate": [0.05, 0.1]}, or trials'
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
    raise InputError(f"sweep: {name}={values!r} should be a list of what to try")


def _draw(name: str, values: Any, draw: random.Random) -> Any:
    """One of a list, or a number of a range: whole where both ends are, and max above 1."""
    if not isinstance(values, Mapping):
        return draw.choice(_choices(name, values))
    low, high = values.get("min", math.nan), values.get("max", math.nan)
    by_log = values.get("log", False)
    numbers = all(isinstance(each, int | float) for each in (low, high))
    if (
        not numbers
        or not low < high
        or (by_log and low <= 0)
        or set(values) - {"min", "max", "log"}
    ):
        raise InputError(
            f"sweep: {name}={dict(values)!r} is no range: write "
            '{"min": 0.001, "max": 0.1, "log": true}, min below max, and above 0 with log'
        )
    whole = float(low).is_integer() and float(high).is_integer() and high > 1
    if by_log:
        found = math.exp(draw.uniform(math.log(low), math.log(high)))
        return round(found) if whole else float(f"{found:.3g}")
    return draw.randint(int(low), int(high)) if whole else float(f"{draw.uniform(low, high):.3g}")
