"""The Argo Workflow that owns a run's pods: a real object, of the smallest resource definition."""

import uuid
from typing import Any

from kubernetes import client

from tests.e2e.harness import definitions
from tests.e2e.harness.grounds import Grounds, patiently

GROUP, VERSION, PLURAL = "argoproj.io", "v1alpha1", "workflows"


def define(api: client.ApiClient) -> None:
    """Make Workflows known to the cluster, if they are not."""
    definitions.define(api, f"{GROUP}/{VERSION}", "Workflow")


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
