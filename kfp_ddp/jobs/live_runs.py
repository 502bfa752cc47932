"""Which pipeline runs are live, by their objects in the cluster."""

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
    """Return a function on run ids: whether a run has a Workflow or a job that is not over.

    The cluster is read once, by this call. Outside of a cluster no run is live.

    Args:
        api: The cluster; None for that of this pod.

    Raises:
        StorageError: the runs cannot be listed, so nothing may be considered unused.
    """
    if api is None:
        if not os.environ.get("KUBERNETES_SERVICE_HOST"):
            return lambda run_id: False
        try:
            api = Api.connect()
        except InputError as error:
            raise StorageError(f"which runs live cannot be seen: {error}") from error
    workflows = _items(api, custom(WORKFLOWS, api.namespace, "workflows"))
    live = {label(item, KFP_RUN) for item in workflows if phase(item) not in _OVER}
    for kind in KINDS.values():
        jobs = _items(api, kind.path(api.namespace))
        live |= {label(job, RUN) for job in jobs if not kind.state(job).over}
    return lambda run_id: run_id in live


def _items(api: Api, path: str) -> list[Object]:
    """Return the objects of a collection; none without its API or the right to read it.

    An account that may not read a kind of job creates none either. Workflows must be readable.
    """
    try:
        objects: list[Object] = api.call("GET", path, retry=True)["items"]
    except ApiError as error:
        if error.status == 404 or (error.status == 403 and WORKFLOWS not in path):
            return []
        raise StorageError(
            f"which runs live cannot be seen ({error.message}); apply deploy/rbac"
        ) from error
    return objects
