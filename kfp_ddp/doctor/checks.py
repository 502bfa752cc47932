"""What `kfp-ddp doctor` looks at, in the order in which it is told."""

from kfp_ddp.base.errors import KfpDdpError
from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.doctor.cluster import claim, gpus, operators, queues, storage
from kfp_ddp.doctor.finding import Finding
from kfp_ddp.doctor.kfp_server import kfp_server
from kfp_ddp.doctor.rights import copy_rights, rights

CLAIMS = ("kfp-ddp-data", "kfp-ddp-work")
"""Those that train_resnet uses if it is not told otherwise."""


def examine(namespace: str, service_account: str, host: str) -> list[Finding]:
    """All findings for the current context."""
    try:
        api = Api.connect(namespace)
        version = api.call("GET", "/version")
    except KfpDdpError as error:
        remedy = "check `kubectl cluster-info` and KUBECONFIG"
        unreachable = Finding("bad", "API server", str(error).splitlines()[0], remedy)
        return [unreachable, kfp_server(host)] if host else [unreachable]
    found = [Finding("ok", "API server", f"Kubernetes {version['gitVersion']}")]
    found += operators(api)
    found += rights(api, service_account)
    found += copy_rights(api, service_account)
    found += [claim(api, name) for name in CLAIMS]
    found.append(storage(api))
    found.append(gpus(api))
    found += queues(api)
    found.append(kfp_server(host))
    return found
