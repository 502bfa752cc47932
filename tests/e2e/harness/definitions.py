"""Kinds of objects that a cluster does not have by itself, made known to it with any content."""

from collections.abc import Mapping
from types import MappingProxyType

from kubernetes import client

from tests.e2e.harness.grounds import until


def define(
    api: client.ApiClient,
    group_version: str,
    kind: str,
    annotations: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Define a namespaced kind if it is not there, and wait until it is served; its name."""
    group, _, version = group_version.partition("/")
    plural, name = f"{kind.lower()}s", f"{kind.lower()}s.{group}"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "annotations": dict(annotations)},
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
    definitions = client.ApiextensionsV1Api(api)
    try:
        definitions.create_custom_resource_definition(body)
    except client.ApiException as error:
        if error.status != 409:
            raise

    def established() -> bool:
        found = definitions.read_custom_resource_definition(name)
        conditions = found.status.conditions or []
        return any(c.type == "Established" and c.status == "True" for c in conditions)

    until(established, f"the definition of {kind}", 30)
    return name
