"""What every engine's entry point has in common when it runs as a step of a pipeline."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kfp_ddp.training.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")


def step(run: Callable[P, R]) -> Callable[P, R]:
    """Make an `InputError` end the step with its one line instead of a traceback.

    Raises:
        SystemExit: with the line, so that the process exits with 1.
    """

    @functools.wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except InputError as error:
            raise SystemExit(f"error: {error}") from error

    return wrapper
