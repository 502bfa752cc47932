"""The Argo Workflow that owns a run's pods: a real object, of the smallest resource definition."""

import uuid
from typing import Any

from kubernetes import client

from tests.e2e.harness.grounds import Grounds, patiently, until

GROUP, VERSION, PLURAL = "argoproj.io", "v1alpha1", "workflows"
_DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "Workflow", "plural": PLURAL, "singular": "workflow"},
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


def define(api: client.ApiClient) -> None:
    """Make Workflows known to the cluster, if they are not."""
    definitions = client.ApiextensionsV1Api(api)
    try:
        definitions.create_custom_resource_definition(_DEFINITION)
    except client.ApiException as error:
        if error.status != 409:
            raise

    def established() -> bool:
        found = definitions.read_custom_resource_definition(f"{PLURAL}.{GROUP}")
        conditions = found.status.conditions or []
        return any(c.type == "Established" and c.status == "True" for c in conditions)

    until(established, "the definition of Workflow", 30)


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
    made: dict[str, Any] = grounds.custom.create_namespaced_custom_object(
        GROUP, VERSION, grounds.namespace, PLURAL, body
    )
    return made


def terminate(grounds: Grounds, name: str) -> None:
    """What KFP's API server does when a run is terminated."""
    patiently(
        lambda: grounds.custom.patch_namespaced_custom_object(
            GROUP, VERSION, grounds.namespace, PLURAL, name, {"spec": {"activeDeadlineSeconds": 0}}
        )
    )


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
