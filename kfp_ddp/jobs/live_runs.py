"""Which runs are live: they have a Workflow or a job that is not over."""

import os
from collections.abc import Callable

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.jobs.identity import KFP_RUN, RUN
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import label, phase
from kfp_ddp.k8s.resource import WORKFLOWS, Resource

OVER = ("Succeeded", "Failed", "Error")


def live_runs(api: Api | None = None) -> Callable[[str], bool]:
    """Return a function on run ids: whether a run has a Workflow or a job that is not over.

    The cluster is read once, by this call. Outside of a cluster no run is live. StorageError if the
    runs cannot be listed, so that nothing may be considered unused.
    """
    if api is None:
        if not os.environ.get("KUBERNETES_SERVICE_HOST"):
            return lambda run_id: False
        try:
            api = Api.connect()
        except InputError as error:
            raise StorageError(f"which runs live cannot be seen: {error}") from error
    workflows = _objects(api, WORKFLOWS)
    live = {label(item, KFP_RUN) for item in workflows if phase(item) not in OVER}
    for kind in KINDS.values():
        jobs = _objects(api, kind.resource)
        live |= {label(job, RUN) for job in jobs if not kind.state(job).over}
    return lambda run_id: run_id in live


def _objects(api: Api, resource: Resource) -> list[Object]:
    """Return the objects of a resource; none without its API or the right to read it.

    No run has a kind of job that its account may not list, as both accounts of deploy/rbac may list
    all kinds. Workflows must be readable.
    """
    try:
        return api.list_objects(resource, retry=True)
    except ApiError as error:
        is_unreadable_kind = error.status == 403 and resource != WORKFLOWS
        if error.status == 404 or is_unreadable_kind:
            return []
        raise StorageError(f"which runs live cannot be seen: {error}") from error
