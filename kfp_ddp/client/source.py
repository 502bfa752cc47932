"""The ConfigMap with our source, which pods of public images need, in the namespace of a run."""

import json
from collections.abc import Mapping
from typing import Any

from kfp_ddp.client.run_info import RunFinder
from kfp_ddp.core import config
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import Images
from kfp_ddp.jobs.source import archive, config_map, digest_of, is_of, map_name
from kfp_ddp.k8s.api import Api, ApiError
from kfp_ddp.k8s.resource import CONFIG_MAPS
from kfp_ddp.pipelines.document import Document


def with_source(pipeline: Document, finder: RunFinder, settings: Mapping[str, Any]) -> Document:
    """Return a pipeline that uses the ConfigMap of this very source, and create that if needed.

    `settings` are those of the images. Without a cluster to look into, or the right to, it is that
    of the version. InputError if it is missing and may not be created.
    """
    images = Images.create(settings)
    if not (images.public and {images.launcher, images.trainer} & {*pipeline.images()}):
        return pipeline
    try:
        api = finder.api()
    except InputError:  # no cluster is configured
        return pipeline
    name = ensure(api)
    spec, platforms = (
        json.loads(json.dumps(part).replace(map_name(), name))
        for part in (pipeline.spec, pipeline.platforms)
    )
    return Document(spec, platforms)


def ensure(api: Api) -> str:
    """Return the name of the namespace's ConfigMap with this source; create it if needed.

    InputError if the account may not.
    """
    content = archive()
    digest = digest_of(content)
    for name in (map_name(), map_name(digest)):
        try:
            existing = api.get(CONFIG_MAPS, name)
        except ApiError:
            return map_name()  # it may be there
        if existing is None:
            pip = config.chosen("pip_index_url", "pip_proxy")
            try:
                api.create(CONFIG_MAPS, config_map(content, name, *pip.values()))
            except ApiError as error:
                raise InputError(
                    f"the namespace lacks the ConfigMap {name} with the source for public images: "
                    f"run kfp-ddp install -n {api.namespace} by an account that may create it; "
                    f"{error.message}"
                ) from error
            return name
        if is_of(existing, digest):
            break
    return name
