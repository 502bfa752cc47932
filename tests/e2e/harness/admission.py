"""Pods that the API server changes as they are created, by an admission policy.

An MPIJob needs it where nothing can be pulled: the Training Operator puts an init container before
`mpirun` that copies kubectl out of an image of its own. In a namespace prepared here, the API
server gives that container our image and the kubectl of this machine, which pods see under /usr.
"""

import contextlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.e2e.harness.grounds import IMAGE, Grounds, until, with_retries

GROUP = ("admissionregistration.k8s.io", "v1")
INDEX = "training.kubeflow.org/replica-index"
GATE = "test.kfp-ddp/late"
GATES = f'JSONPatch{{op: "add", path: "/spec/schedulingGates", value: [{{"name": "{GATE}"}}]}}'
KUBECTL = "kubectl-delivery"
"""The operator's init container."""
POD_CREATION = dict[str, Any](
    apiGroups=[""], apiVersions=["v1"], operations=["CREATE"], resources=["pods"]
)


@contextmanager
def _policy(grounds: Grounds, condition: str, patch: str, probe: dict[str, Any]) -> Iterator[None]:
    """Patch every new pod of the namespace that meets a condition, during the block.

    Args:
        grounds: The namespace.
        condition: Expression in CEL.
        patch: Operations of a JSONPatch, in CEL.
        probe: A pod that meets the condition; the block begins once the API server patches it.
    """
    name = f"test-{uuid.uuid4().hex[:8]}.kfp-ddp.test"
    space = {"matchLabels": {"kubernetes.io/metadata.name": grounds.namespace}}
    spec = {
        "matchConstraints": {"resourceRules": [POD_CREATION], "namespaceSelector": space},
        "matchConditions": [{"name": "condition", "expression": condition}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{patch}]"}}],
        "reinvocationPolicy": "Never",
        "failurePolicy": "Fail",
    }
    objects = (
        ("MutatingAdmissionPolicy", "mutatingadmissionpolicies", spec),
        ("MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings", {"policyName": name}),
    )
    containers = probe["spec"].get("initContainers", [])
    unpatched = None, [container["image"] for container in containers]
    # The API server goes on patching for about a second by the policy of the test before.
    until(lambda: _dry_run(grounds, probe) == unpatched, "the end of the earlier policy", 60)
    custom = grounds.custom
    with contextlib.ExitStack() as stack:
        for kind, plural, content in objects:
            body = {"apiVersion": "/".join(GROUP), "kind": kind, "metadata": {"name": name}}
            custom.create_cluster_custom_object(*GROUP, plural, {**body, "spec": content})
            stack.callback(partial(custom.delete_cluster_custom_object, *GROUP, plural, name))
        until(lambda: _dry_run(grounds, probe) != unpatched, "the policy's effect", 60)
        yield


def _dry_run(grounds: Grounds, pod: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the policies change of a pod: its gates, and its init containers' images."""
    spec = grounds.core.create_namespaced_pod(grounds.namespace, pod, dry_run="All").spec
    images = [container.image for container in spec.init_containers or []]
    return spec.scheduling_gates, images


@contextmanager
def gate_pods(grounds: Grounds, index: int) -> Iterator[Callable[[], None]]:
    """Gate every such pod of this namespace's jobs; yields a function that lets them go."""
    of_job = f"object.metadata.?labels[?'{INDEX}'].orValue('') == '{index}'"
    container = {"name": "main", "image": "none:1"}
    meta = {"name": "probe", "labels": {INDEX: str(index)}}
    probe: Any = {"metadata": meta, "spec": {"containers": [container]}}

    def release() -> None:
        pods = with_retries(lambda: grounds.core.list_namespaced_pod(grounds.namespace)).items
        for pod in pods:
            if pod.spec.scheduling_gates:
                free: Any = {"spec": {"schedulingGates": None}}
                grounds.core.patch_namespaced_pod(pod.metadata.name, grounds.namespace, free)

    with _policy(grounds, of_job, GATES, probe):
        yield release


def skip_without_mpi() -> None:
    """Skip the test where pods would find no Open MPI, or no kubectl, in this machine's /usr."""
    for program in ("mpirun", "orted", "kubectl"):
        if shutil.which(program, path="/usr/local/bin:/usr/bin") is None:
            pytest.skip(f"no {program} under /usr; openmpi-bin and kubectl are needed")


@contextmanager
def provide_kubectl(grounds: Grounds) -> Iterator[None]:
    """Let MPIJobs of the namespace start, while the block lasts."""
    link = 'ln -s "$(command -v kubectl)" "$TARGET_DIR/kubectl"'
    path = "/spec/initContainers/0"
    patch = (
        f"JSONPatch{{op: 'replace', path: '{path}/image', value: '{IMAGE}'}}, "
        f"JSONPatch{{op: 'add', path: '{path}/command', value: ['sh', '-c', '{link}']}}"
    )
    delivers = f"object.spec.?initContainers.orValue([]).exists(c, c.name == '{KUBECTL}')"
    containers = {
        "initContainers": [{"name": KUBECTL, "image": "some:1"}],
        "containers": [{"name": "mpi", "image": IMAGE}],
    }
    with _policy(grounds, delivers, patch, {"metadata": {"name": KUBECTL}, "spec": containers}):
        yield
