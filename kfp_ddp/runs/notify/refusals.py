"""Tell of a run that its first step refuses, for which no exit handler runs."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.runs.notify.channels import send
from kfp_ddp.runs.notify.outcome import Outcome
from kfp_ddp.runs.notify.settings import Notification, check_keys

R = TypeVar("R")
Step = Callable[[dict[str, Any]], R]


def refusals_told(run: Step[R]) -> Step[R]:
    """Make a step check the keys of its `job`, in a pod, and tell of its error before it raises it.

    Raises:
        InputError: a key that the bucket's secret lacks.
    """

    @functools.wraps(run)
    def wrapper(inputs: dict[str, Any]) -> R:
        try:
            if os.environ.get("KFP_POD_NAME"):  # elsewhere the secret may be the cluster's alone
                check_keys(Notification.among(inputs["job"]))
            return run(inputs)
        except KfpDdpError as error:
            _tell(inputs, str(error))
            raise

    return wrapper


def _tell(inputs: dict[str, Any], reason: str) -> None:
    try:
        notification = Notification.among(inputs["job"])
    except KfpDdpError:
        return
    if run_id := inputs.get("run_id"):
        address = notification.link(run_id)
        failed = Outcome(run_id, "failed", reason, step="preflight", address=address)
        for line in send(notification, failed):
            print(line, flush=True)
