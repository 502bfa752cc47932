"""Custom resources with the smallest definition, such as the Argo Workflow that owns a run."""

import uuid
from typing import Any

from kubernetes import client

from tests.e2e.harness.grounds import Grounds, until, with_retries

GROUP, VERSION, PLURAL = "argoproj.io", "v1alpha1", "workflows"


def define(api: client.ApiClient) -> None:
    """Make Workflows known to the cluster, if they are not."""
    define_kind(api, f"{GROUP}/{VERSION}", "Workflow")


def create(grounds: Grounds, pipeline: str, run_id: str) -> dict[str, Any]:
    """The Workflow of a run, named and labelled as KFP's API server does."""
    body = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Workflow",
        "metadata": {
            "name": f"{pipeline}-{uuid.uuid4().hex[:5]}",
            "labels": {"pipeline/runid": run_id},
        },
        "spec": {"entrypoint": "entrypoint"},
    }
    created: dict[str, Any] = grounds.custom.create_namespaced_custom_object(
        GROUP, VERSION, grounds.namespace, PLURAL, body
    )
    return created


def terminate(grounds: Grounds, name: str) -> None:
    """What KFP's API server does when a run is terminated."""
    where, body = (GROUP, VERSION, grounds.namespace, PLURAL, name), {"activeDeadlineSeconds": 0}
    patch = grounds.custom.patch_namespaced_custom_object
    with_retries(lambda: patch(*where, {"spec": body}))


def owner(workflow: dict[str, Any]) -> dict[str, Any]:
    """The reference by which the run's pods belong to it."""
    return {
        "apiVersion": workflow["apiVersion"],
        "kind": workflow["kind"],
        "name": workflow["metadata"]["name"],
        "uid": workflow["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def define_kind(api: client.ApiClient, group_version: str, kind: str) -> str:
    """Define a namespaced kind with any content, wait until it is served, and return its name."""
    group, _, version = group_version.partition("/")
    plural, name = f"{kind.lower()}s", f"{kind.lower()}s.{group}"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    body: dict[str, Any] = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
    establish(api, body)
    return name


def establish(api: client.ApiClient, body: dict[str, Any]) -> None:
    """Create a definition of a kind, unless it exists, and wait until it is served."""
    definitions, name = client.ApiextensionsV1Api(api), body["metadata"]["name"]
    try:
        definitions.create_custom_resource_definition(body)
    except client.ApiException as error:
        if error.status != 409:
            raise

    def established() -> bool:
        result = definitions.read_custom_resource_definition(name)
        conditions = result.status.conditions or []
        return any(c.type == "Established" and c.status == "True" for c in conditions)

    until(established, f"the definition {name}", 60)
