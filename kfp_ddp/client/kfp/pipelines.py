"""Pipelines and their versions on a KFP server: find, read, upload.

An uploaded version is named by its content, so that the same pipeline is not stored twice.
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError, KfpDdpError, RefusedError
from kfp_ddp.core.files import sha256_of_json

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Pipeline

    from kfp_ddp.client.kfp.compat import Client
    from kfp_ddp.pipelines.document import Document

LONGEST = 32 * 1024**2
"""Largest pipeline that the server accepts, in bytes."""


class PipelineVersion(NamedTuple):
    """A version of a pipeline on the server, by names and ids."""

    pipeline: str
    version: str
    pipeline_id: str
    version_id: str
    new: bool = False
    """True if it was uploaded just now."""

    @property
    def title(self) -> str:
        """The version as PIPELINE@VERSION."""
        return f"{self.pipeline}@{self.version}"


def find_pipeline(client: "Client", name: str) -> "V2beta1Pipeline | None":
    """Return the pipeline of a name: that of the user's namespace before a shared one."""
    for namespace in dict.fromkeys((client.get_user_namespace() or "", "")):
        answer = client.pipeline_service.pipeline_service_list_pipelines(
            namespace=namespace, filter=_name_filter(name)
        )
        if answer.pipelines:
            return answer.pipelines[0]
    return None


def find_version(
    client: "Client", pipeline: "V2beta1Pipeline", name: str = ""
) -> PipelineVersion | None:
    """Return a pipeline's version of this name, or its newest one; None if it does not exist."""
    answer = client.list_pipeline_versions(
        pipeline.pipeline_id,
        page_size=1,
        sort_by="created_at desc",
        filter=_name_filter(name) if name else None,
    )
    if not answer.pipeline_versions:
        return None
    (newest,) = answer.pipeline_versions
    ids = newest.pipeline_id, newest.pipeline_version_id
    return PipelineVersion(pipeline.display_name, newest.display_name, *ids)


def graph_of(spec: object) -> Mapping[str, Any]:
    """Return the pipeline's spec without the platform's; empty if there is none."""
    graph = spec.get("pipeline_spec", spec) if isinstance(spec, Mapping) else {}
    return graph if isinstance(graph, Mapping) else {}


def content_name(document: "Document", name: str) -> str:
    """Return a version's name: the pipeline's name and a digest of the content."""
    return f"{name}-{sha256_of_json(document.body())[:12]}"


def upload(
    client: "Client", document: "Document", name: str = "", description: str = ""
) -> PipelineVersion:
    """Upload a pipeline as the newest version, unless the newest one has the same content.

    InputError: it is too large, or another client uploads the same right now.
    """
    import yaml

    name = name or document.name
    version = content_name(document, name)
    documents = [document.spec, document.platforms] if document.platforms else [document.spec]
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = yaml.dump_all(documents, Dumper=dumper, sort_keys=False, allow_unicode=True)
    if len(text.encode()) > LONGEST:
        raise InputError(f"{name} is larger than 32 MB, the limit of a KFP server")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.yaml".replace("/", "-"))
        file.write_text(text, encoding="utf-8")
        return _upload(client, file, name, version, description)


def _upload(
    client: "Client", file: Path, name: str, version: str, description: str
) -> PipelineVersion:
    pipeline = find_pipeline(client, name)
    newest = pipeline and find_version(client, pipeline)
    if newest and (newest.version == version or newest.version.startswith(f"{version}-")):
        return newest
    created, pipeline = pipeline is None, pipeline or _create(client, name)
    # An older version may have this content.
    names = itertools.chain([version], (f"{version}-{number}" for number in itertools.count(2)))
    unique = next(one for one in names if created or not find_version(client, pipeline, one))
    try:
        answer = client.upload_service.upload_pipeline_version(
            str(file),
            name=unique,
            pipelineid=pipeline.pipeline_id,
            **({"description": description} if description else {}),
        )
    except KfpDdpError as error:
        with contextlib.suppress(KfpDdpError):  # report why the upload failed
            if existing := find_version(client, pipeline, unique):  # only the answer was lost
                return existing._replace(new=True)
            if created:
                client.delete_pipeline(pipeline.pipeline_id)
        if getattr(error, "status", 0) == HTTPStatus.CONFLICT:
            raise InputError(f"another client is uploading {unique} right now") from None
        raise
    return PipelineVersion(name, unique, pipeline.pipeline_id, answer.pipeline_version_id, new=True)


def _create(client: "Client", name: str) -> "V2beta1Pipeline":
    import kfp_server_api

    space = client.get_user_namespace() if client.multi_user else None
    body = kfp_server_api.V2beta1Pipeline(name=name, display_name=name, namespace=space)
    try:
        return client.pipeline_service.pipeline_service_create_pipeline(body)
    except RefusedError as error:
        if error.status == HTTPStatus.CONFLICT:
            raise InputError(f"another client is creating pipeline {name} right now") from None
        raise


def _name_filter(name: str) -> str:
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})
