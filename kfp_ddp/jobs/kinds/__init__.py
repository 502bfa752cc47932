"""The kinds of jobs. A new kind is a class here, with its name in KindName."""

from kfp_ddp.jobs.fields import KindName
from kfp_ddp.jobs.kinds.base import Kind, PodRole
from kfp_ddp.jobs.kinds.rayjob import RayJob
from kfp_ddp.jobs.kinds.training_operator import MPIJob, PyTorchJob, TFJob, XGBoostJob
from kfp_ddp.jobs.kinds.trainjob import TrainJob
from kfp_ddp.k8s.api import Object

__all__ = ["KINDS", "Kind", "KindName", "pod_role", "pod_title"]

_ALL: tuple[type[Kind], ...] = (PyTorchJob, TrainJob, TFJob, MPIJob, XGBoostJob, RayJob)
KINDS: dict[str, Kind] = {kind.name: kind() for kind in _ALL}


def pod_role(pod: Object) -> PodRole:
    """Return the role of a pod of any kind of job; one of no job has its name as title."""
    roles = (kind.pod_role(pod) for kind in KINDS.values())
    return next((role for role in roles if role), PodRole(str(pod["metadata"]["name"])))


def pod_title(pod: Object) -> str:
    """Return a pod's role and number, such as worker-0: the prefix of its log lines."""
    return pod_role(pod).title
