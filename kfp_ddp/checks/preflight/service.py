"""The service that a model is to be rolled out on, looked at before anything is trained."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.k8s.api import Api, allowed
from kfp_ddp.models.release import Deployment, part_of
from kfp_ddp.models.serving.inference_service import API_VERSION, storage_uri
from kfp_ddp.models.serving.rollout import PLURAL, Service, served

VERBS = ("get", "list", "watch", "create", "patch")


def check_service(release: Mapping[str, Any], destination: str) -> str:
    """The service's name, '' for none; refused where a model could not be rolled out on it.

    Args:
        release: Settings of the release by name.
        destination: Where bundles are uploaded to.

    Raises:
        InputError: KServe could not read the bundle, or is not there, or no right to it, or a
            service of somebody else.
    """
    name = part_of(release, Deployment).service
    if not name:
        return ""
    if not destination:
        raise InputError(
            f"release names the service {name}, and no destination: KServe serves what lies in a "
            "bucket, so give destination too"
        )
    storage_uri(f"{destination}/model")
    api = Api.connect()
    served(api)
    group = API_VERSION.partition("/")[0]
    lacking = [verb for verb in VERBS if not allowed(api, verb, group, PLURAL)]
    if lacking:
        raise InputError(
            f"no right to {', '.join(lacking)} {PLURAL} in namespace {api.namespace}; apply "
            "deploy/rbac there"
        )
    Service(api, name).find()
    return name
