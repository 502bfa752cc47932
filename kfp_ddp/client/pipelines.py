"""Pipelines that a KFP server has, and their versions."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import InputError

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Pipeline, V2beta1PipelineVersion

NEWEST = "created_at desc"


def named(name: str) -> str:
    """What the API is asked for to find this name."""
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})


def find_pipeline(client: "kfp.Client", name: str) -> "V2beta1Pipeline | None":
    """The pipeline of a name: of the own namespace, where there are several users, else shared."""
    for namespace in dict.fromkeys((client.get_user_namespace() or "", "")):
        answer = client._pipelines_api.pipeline_service_list_pipelines(
            namespace=namespace, filter=named(name)
        )
        if answer.pipelines:
            return answer.pipelines[0]
    return None


def find_version(
    client: "kfp.Client", pipeline: "V2beta1Pipeline", name: str = ""
) -> "V2beta1PipelineVersion":
    """A pipeline's version of that name, or its newest.

    Raises:
        InputError: there is none.
    """
    found = version_or_none(client, pipeline, name)
    if found is None:
        which = f"version {name!r}" if name else "version"
        raise InputError(f"pipeline {pipeline.display_name!r} has no {which} on the server")
    return found


def version_or_none(
    client: "kfp.Client", pipeline: "V2beta1Pipeline", name: str = ""
) -> "V2beta1PipelineVersion | None":
    """The same, None where there is none."""
    answer = client.list_pipeline_versions(
        pipeline.pipeline_id, page_size=1, sort_by=NEWEST, filter=named(name) if name else None
    )
    return answer.pipeline_versions[0] if answer.pipeline_versions else None


def spec_of(client: "kfp.Client", pipeline_id: str, version_id: str) -> Mapping[str, Any]:
    """What a version holds, as it was uploaded."""
    version = client.get_pipeline_version(pipeline_id, version_id)
    return version.pipeline_spec if isinstance(version.pipeline_spec, Mapping) else {}


def graph_of(spec: object) -> Mapping[str, Any]:
    """The pipeline's spec alone, without that of its platform; empty where it is not known."""
    found = spec.get("pipeline_spec", spec) if isinstance(spec, Mapping) else {}
    return found if isinstance(found, Mapping) else {}
