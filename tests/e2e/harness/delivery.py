"""What an MPIJob needs where nothing can be pulled: the operator's init container, from our image.

The Training Operator puts an init container before `mpirun` that copies kubectl out of an image
of its own. In a namespace prepared here, the API server gives that container our image and the
kubectl of this machine, which pods see under /usr.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness.grounds import IMAGE, Grounds, until

GROUP, VERSION = "admissionregistration.k8s.io", "v1"
NAME = "kubectl-delivery"
POLICIES, BINDINGS = "mutatingadmissionpolicies", "mutatingadmissionpolicybindings"


def skip_without_mpi() -> None:
    """Skip the test where pods would find no Open MPI, or no kubectl, in this machine's /usr."""
    for program in ("mpirun", "orted", "kubectl"):
        if shutil.which(program, path="/usr/local/bin:/usr/bin") is None:
            pytest.skip(f"no {program} under /usr; openmpi-bin and kubectl are needed")


@contextmanager
def delivered(grounds: Grounds) -> Iterator[None]:
    """Let MPIJobs of the namespace start, while the block lasts."""
    name = f"{NAME}-{grounds.namespace}"
    policy = {"metadata": {"name": name}, "spec": _policy(grounds.namespace)}
    binding = {"metadata": {"name": name}, "spec": {"policyName": name}}
    custom = grounds.custom
    custom.create_cluster_custom_object(
        GROUP, VERSION, POLICIES, _typed("MutatingAdmissionPolicy", policy)
    )
    try:
        custom.create_cluster_custom_object(
            GROUP, VERSION, BINDINGS, _typed("MutatingAdmissionPolicyBinding", binding)
        )
        until(lambda: _image(grounds) == IMAGE, "the policy's effect", 30)
        yield
    finally:
        for plural in (BINDINGS, POLICIES):
            try:
                custom.delete_cluster_custom_object(GROUP, VERSION, plural, name)
            except client.ApiException as error:
                if error.status != 404:
                    raise


def _typed(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, **body}


def _policy(namespace: str) -> dict[str, Any]:
    link = 'ln -s "$(command -v kubectl)" "$TARGET_DIR/kubectl"'
    path = "/spec/initContainers/0"
    patch = (
        f"[JSONPatch{{op: 'replace', path: '{path}/image', value: '{IMAGE}'}}, "
        f"JSONPatch{{op: 'add', path: '{path}/command', value: ['sh', '-c', '{link}']}}]"
    )
    delivers = f"object.spec.?initContainers.orValue([]).exists(c, c.name == '{NAME}')"
    return {
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods"],
                }
            ],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        },
        "matchConditions": [{"name": "delivers", "expression": delivers}],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }


def _image(grounds: Grounds) -> str:
    """The image that a launcher's init container would get now."""
    container = {"name": "mpi", "image": IMAGE}
    spec = {"initContainers": [{"name": NAME, "image": "some:1"}], "containers": [container]}
    created = grounds.core.create_namespaced_pod(
        grounds.namespace, {"metadata": {"name": NAME}, "spec": spec}, dry_run="All"
    )
    return str(created.spec.init_containers[0].image)
