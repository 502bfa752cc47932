"""Images of a run, and the source that pods of public images need."""

import json
from collections.abc import Mapping
from typing import Any

from kfp_ddp.client.run.run_info import RunFinder
from kfp_ddp.core import config
from kfp_ddp.core.container_images import REGISTRY, Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.shipping.own_package import config_map, has_source, map_name, renamed
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.k8s.resource import CONFIG_MAPS
from kfp_ddp.pipelines.document import Document


def check_images(pipeline: Document, registry: str) -> None:
    """Raise InputError for images of the components' own registry, unless it is the user's."""
    default = [image for image in pipeline.images() if image.startswith(f"{REGISTRY}/")]
    if default and registry.rstrip("/") != REGISTRY:
        raise InputError(
            f"{default[0]} is published nowhere: compile the file again for public images, or push "
            "your own (images/README.md) and give --registry"
        )


def with_source(pipeline: Document, finder: RunFinder, settings: Mapping[str, Any]) -> Document:
    """Return a pipeline that uses the ConfigMap of this very source, and create that if needed.

    `settings` are those of the images. Without a cluster to look into, it may be missing.
    InputError if it may not be created, or has another source.
    """
    images = Images.create(settings)
    if not (images.public and {images.launcher, images.trainer} & {*pipeline.images()}):
        return pipeline
    document = Document(*json.loads(renamed(json.dumps(pipeline), map_name())))
    try:
        api = finder.api()
    except InputError:  # no cluster is configured
        return document
    ensure_source(api)
    return document


def ensure_source(api: Api) -> str:
    """Return the name of the namespace's ConfigMap with this source; create it if needed.

    InputError if the account may not, or if it has another source.
    """
    name = map_name()
    try:
        existing = api.get(CONFIG_MAPS, name)
    except ApiError:
        return name  # it may be there
    if existing is None:
        pip = config.chosen("pip_index_url", "pip_proxy")
        try:
            api.create(CONFIG_MAPS, config_map(name, *pip.values()))
        except ApiError as error:
            raise InputError(
                f"the namespace lacks the ConfigMap {name} with the source for public images: "
                f"run kfp-ddp install -n {api.namespace} by an account that may create it; "
                f"{error.message}"
            ) from error
    elif not has_source(existing):
        raise InputError(
            f"the ConfigMap {name} has another source than its name: somebody has changed it; "
            f"kfp-ddp install -n {api.namespace} writes this source into it"
        )
    return name
