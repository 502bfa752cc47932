"""Which pipeline runs still live, by what the cluster has of them."""

import os
from collections.abc import Callable

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.jobs.identity import RUN, WORKFLOWS
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, ApiError, Object, custom
from kfp_ddp.k8s.objects import label, phase

KFP_RUN = "pipeline/runid"
"""The label that KFP gives a run's Workflow and pods."""
_OVER = ("Succeeded", "Failed", "Error")


def live_runs(api: Api | None = None) -> Callable[[str], bool]:
    """Tells whether a run still has a Workflow or a job that is not over; asks once, here.

    Outside of a cluster no run lives.

    Args:
        api: Asks the cluster; that of this pod without a value.

    Raises:
        StorageError: it cannot be seen, so nothing may be taken for unused.
    """
    if api is None:
        if not os.environ.get("KUBERNETES_SERVICE_HOST"):
            return lambda run_id: False
        try:
            api = Api.connect()
        except InputError as error:
            raise StorageError(f"which runs live cannot be seen: {error}") from error
    workflows = _items(api, custom(WORKFLOWS, api.namespace, "workflows"))
    live = {label(each, KFP_RUN) for each in workflows if phase(each) not in _OVER}
    for kind in KINDS.values():
        jobs = _items(api, kind.path(api.namespace))
        live |= {label(job, RUN) for job in jobs if not kind.state(job).over}
    return lambda run_id: run_id in live


def _items(api: Api, path: str) -> list[Object]:
    """What a collection holds; nothing where its API is not installed, or not for this account.

    Who may not look at a kind of job makes none either; Workflows have to be seen.
    """
    try:
        found: list[Object] = api.call("GET", path, retry=True)["items"]
    except ApiError as error:
        if error.status == 404 or (error.status == 403 and WORKFLOWS not in path):
            return []
        raise StorageError(
            f"which runs live cannot be seen ({error.message}); apply deploy/rbac"
        ) from error
    return found
