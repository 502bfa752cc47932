"""What every engine's entry point has in common when it runs as a step of a pipeline."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kfp_ddp.base.errors import KfpDdpError

P = ParamSpec("P")
R = TypeVar("R")

KEY = "/var/run/secrets/kfp-ddp/key.json"
"""Where pipelines mount the service account's key of a bucket, if there is one."""


def step(run: Callable[P, R]) -> Callable[P, R]:
    """Make a `KfpDdpError` end the step with its one line instead of a traceback.

    Raises:
        SystemExit: with the line, so that the process exits with 1.
    """

    @functools.wraps(run)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        _adopt_key()
        try:
            return run(*args, **kwargs)
        except KfpDdpError as error:
            raise SystemExit(f"error: {error}") from error

    return wrapper


def _adopt_key() -> None:
    """Use the mounted key, unless credentials were named otherwise."""
    if os.path.exists(KEY):
        os.environ.setdefault("GOOGLE_APPLICATION_CREDENTIALS", KEY)


def write_job(artifact: Any, job: dict[str, Any]) -> None:
    """Write the job as it ended, without the server's bookkeeping, to an output artifact."""
    found = {key: value for key, value in job.items() if key != "metadata"}
    if "metadata" in job:
        found["metadata"] = {k: v for k, v in job["metadata"].items() if k != "managedFields"}
    path = Path(artifact.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
