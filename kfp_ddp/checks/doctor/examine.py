"""All checks of `kfp-ddp doctor`, in the order in which they are told."""

from kfp_ddp.checks.doctor.admission import admitted
from kfp_ddp.checks.doctor.finding import Asked, Finding
from kfp_ddp.checks.doctor.kfp_server import kfp_server
from kfp_ddp.checks.doctor.nodes import gpus, room
from kfp_ddp.checks.doctor.operators import gangs, kserve, operators
from kfp_ddp.checks.doctor.queues import queues
from kfp_ddp.checks.doctor.rights import copy_rights, rights
from kfp_ddp.checks.doctor.secret import secret
from kfp_ddp.checks.doctor.storage import claims, storage
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.nodes import schedulable


def examine(asked: Asked) -> list[Finding]:
    """All findings, of the cluster first."""
    try:
        api = Api.connect(asked.namespace, asked.context)
        version = api.call("GET", "/version")
    except KfpDdpError as error:
        said = str(error).splitlines()[0].partition("; ")[0]
        remedy = "let KUBECONFIG name a cluster that `kubectl cluster-info` reaches"
        unreachable = Finding("bad", "API server", said, remedy)
        return [unreachable, kfp_server(asked.host)] if asked.host else [unreachable]
    nodes: list[Object] | None
    try:
        nodes = schedulable(api)
    except ApiError:
        nodes = None
    return [
        Finding("ok", "API server", f"Kubernetes {version['gitVersion']}"),
        *operators(api, asked),
        *gangs(api, asked),
        *kserve(api, asked),
        *rights(api, asked),
        *copy_rights(api, asked),
        *claims(api, asked, nodes),
        storage(api),
        secret(api, asked),
        *admitted(api, asked),
        *room(asked, nodes),
        gpus(asked, nodes),
        *queues(api),
        kfp_server(asked.host),
    ]
