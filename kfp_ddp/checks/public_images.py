"""Check what pods of public images need: our source, and a package index."""

from kfp_ddp.checks.finding import CheckContext, Finding
from kfp_ddp.core import config
from kfp_ddp.core.images import SETTINGS, Images
from kfp_ddp.jobs.source import archive, digest_of, is_of, map_name
from kfp_ddp.k8s.api import ApiError
from kfp_ddp.k8s.objects import condition
from kfp_ddp.k8s.resource import CONFIG_MAPS, JOBS

INDEX_JOB = "kfp-ddp-index"


def public_images(cluster: CheckContext) -> list[Finding]:
    """Report the ConfigMap of this version, and whether a pod reached the package index."""
    if not Images.create(config.chosen(*SETTINGS)).public:
        return []
    what, api, name = "public images", cluster.api, map_name()
    install = f"kfp-ddp install -n {api.namespace}, or set registry for your own images"
    try:
        source = api.get(CONFIG_MAPS, name)
        job = api.get(JOBS, INDEX_JOB)
    except ApiError as error:
        return [Finding("warn", what, error.message, "ask for the right to read ConfigMaps")]
    if source is None:
        return [Finding("warn", what, f"there is no ConfigMap {name} with our source", install)]
    if not is_of(source, digest_of(archive())):
        message = f"{name} holds another state of this version than your kfp-ddp"
        return [Finding("warn", what, message, install)]
    if job is not None and condition(job, "Failed"):
        remedy = f"kubectl logs -n {api.namespace} job/{INDEX_JOB} shows why; --pip-index-url"
        return [Finding("bad", what, "pods do not reach the package index", remedy)]
    if job is None or not condition(job, "Complete"):
        message = "not known yet whether pods reach the package index"
        return [Finding("warn", what, message, install)]
    return [Finding("ok", what, f"source in {name}, and pods reach the package index")]
