"""Uploads of pipelines: a version is named by its content, so the same is never there twice."""

import contextlib
import hashlib
import itertools
import json
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from kfp_ddp.client.pipelines import find_pipeline, version_or_none
from kfp_ddp.core.errors import InputError, KfpDdpError, RefusedError
from kfp_ddp.pipelines.document import Document

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Pipeline

LONGEST = 32 * 1024**2
"""Bytes that the server takes."""


class Uploaded(NamedTuple):
    """A version as the server has it."""

    pipeline: str
    version: str
    pipeline_id: str
    version_id: str
    new: bool
    """Whether it was not there before."""


def content_name(document: Document, name: str) -> str:
    """What the version of this content is called: the pipeline's name and a digest."""
    text = json.dumps(document.body(), sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def upload(
    client: "kfp.Client", document: Document, name: str = "", description: str = ""
) -> Uploaded:
    """Have the server hold this pipeline as its newest version; nothing is sent where it does.

    Args:
        client: Of the server.
        document: What to upload.
        name: Of the pipeline; '' for its own.
        description: Of the version.

    Raises:
        InputError: the pipeline is too large, or somebody uploads the same at this moment.
    """
    name = name or document.name
    version = content_name(document, name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.yaml".replace("/", "-"))
        documents = [document.spec, document.platforms] if document.platforms else [document.spec]
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text = yaml.dump_all(documents, Dumper=dumper, sort_keys=False, allow_unicode=True)
        file.write_text(text, encoding="utf-8")
        if file.stat().st_size > LONGEST:
            raise InputError(f"{name} is larger than the 32 MB that a KFP server takes")
        return _upload(client, file, name, version, description)


def _upload(
    client: "kfp.Client", file: Path, name: str, version: str, description: str
) -> Uploaded:
    pipeline = find_pipeline(client, name)
    if pipeline and (newest := version_or_none(client, pipeline)):
        called = newest.display_name
        if called == version or called.startswith(f"{version}-"):
            ids = newest.pipeline_id, newest.pipeline_version_id
            return Uploaded(name, called, *ids, new=False)
    made, pipeline = pipeline is None, pipeline or _create(client, name)
    unique = version
    for number in itertools.count(2):
        if made or not version_or_none(client, pipeline, unique):
            break
        unique = f"{version}-{number}"  # this content was there before what is the newest now
    try:
        answer = client._upload_api.upload_pipeline_version(
            str(file),
            name=unique,
            pipelineid=pipeline.pipeline_id,
            **({"description": description} if description else {}),
        )
    except KfpDdpError as error:
        with contextlib.suppress(KfpDdpError):  # why the upload failed is told, not what follows
            if held := version_or_none(client, pipeline, unique):  # its answer was lost
                return Uploaded(name, unique, held.pipeline_id, held.pipeline_version_id, new=True)
            if made:
                client.delete_pipeline(pipeline.pipeline_id)
        if getattr(error, "status", 0) == HTTPStatus.CONFLICT:
            raise InputError(f"somebody else uploads {unique} at this moment") from None
        raise
    return Uploaded(name, unique, pipeline.pipeline_id, answer.pipeline_version_id, new=True)


def _create(client: "kfp.Client", name: str) -> "V2beta1Pipeline":
    import kfp_server_api

    body = kfp_server_api.V2beta1Pipeline(name=name, display_name=name)
    if client.multi_user:
        body.namespace = client.get_user_namespace()
    try:
        return client._pipelines_api.pipeline_service_create_pipeline(body)
    except RefusedError as error:
        if error.status == HTTPStatus.CONFLICT:
            raise InputError(f"somebody else creates pipeline {name} at this moment") from None
        raise
