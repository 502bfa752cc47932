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
    return PipelineVersion(
        pipeline.display_name,
        newest.display_name,
        newest.pipeline_id,
        newest.pipeline_version_id,
    )


def graph_of(spec: object) -> Mapping[str, Any]:
    """Return the pipeline's spec without the platform's; empty if there is none."""
    if not isinstance(spec, Mapping):
        return {}
    graph = spec.get("pipeline_spec", spec)
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
    documents = [document.spec]
    if document.platforms:
        documents.append(document.platforms)
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
    created = pipeline is None
    if pipeline is None:
        pipeline = _create(client, name)
        unique = version
    else:
        newest = find_version(client, pipeline)
        if newest:
            numbered = newest.version.startswith(f"{version}-")
            if numbered or newest.version == version:
                return newest
        unique = _free_name(client, pipeline, version)
    more = {"description": description} if description else {}
    try:
        answer = client.upload_service.upload_pipeline_version(
            str(file), name=unique, pipelineid=pipeline.pipeline_id, **more
        )
    except KfpDdpError as error:
        with contextlib.suppress(KfpDdpError):  # report why the upload failed
            existing = find_version(client, pipeline, unique)
            if existing:  # only the answer was lost
                return existing._replace(new=True)
            if created:
                client.delete_pipeline(pipeline.pipeline_id)
        if getattr(error, "status", 0) == HTTPStatus.CONFLICT:
            raise InputError(f"another client is uploading {unique} right now") from None
        raise
    return PipelineVersion(name, unique, pipeline.pipeline_id, answer.pipeline_version_id, new=True)


def _free_name(client: "Client", pipeline: "V2beta1Pipeline", version: str) -> str:
    """Return the name of a new version, with a number if an older one has the same content."""
    name = version
    for number in itertools.count(2):
        if not find_version(client, pipeline, name):
            break
        name = f"{version}-{number}"
    return name


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
