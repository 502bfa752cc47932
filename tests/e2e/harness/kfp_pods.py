"""What KFP's driver and Argo add to the pod of a step: resources, and containers of their own."""

import json
import re
from typing import Any

from tests.e2e.harness.grounds import IMAGE, Grounds

Resources = dict[str, dict[str, str]]
_CHANNEL = re.compile(r"\$.inputs.parameters\['(.+?)'\]")
_MOST = {"cpu": "100m", "memory": "256Mi"}
# KFP 2.17: driverResources and launcherResources of its compiler to Argo, and the security context
# that it gives its own containers.
DRIVER = {
    "limits": {"cpu": "500m", "memory": "512Mi"},
    "requests": {"cpu": "100m", "memory": "64Mi"},
}
LAUNCHER = {"limits": {"cpu": "500m", "memory": "256Mi"}, "requests": {"cpu": "100m"}}
# Stock Argo sets none, so an administrator of a namespace with a quota sets executor.resources.
EXECUTOR = {
    "limits": {"cpu": "500m", "memory": "512Mi"},
    "requests": {"cpu": "10m", "memory": "64Mi"},
}
_NON_ROOT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def resources(spec: Any, command: list[str]) -> Resources:
    """Requests and limits of a step's container, resolved from its inputs as the driver does."""
    fields = json.loads(command[command.index("--executor_input") + 1])
    values = fields.get("inputs", {}).get("parameterValues", {})

    def resolved(text: str) -> str:
        channel = _CHANNEL.search(text)
        if channel is None:
            return text
        result = values[channel[1]]  # the driver fails the run where it is not there
        return result if isinstance(result, str) else ""

    result: Resources = {
        "requests": {"cpu": spec.resource_cpu_request, "memory": spec.resource_memory_request},
        "limits": {"cpu": spec.resource_cpu_limit, "memory": spec.resource_memory_limit},
    }
    for part in result.values():
        for name in [name for name, text in part.items() if not text]:
            del part[name]
        for name, text in part.items():
            part[name] = resolved(text)
            assert part[name], f"the driver cannot read an empty {name}"
    kind, count = spec.accelerator.resource_type, spec.accelerator.resource_count
    if resolved(kind) and resolved(count):
        result["limits"][resolved(kind)] = resolved(count)
    return result


def complete(grounds: Grounds, pod: dict[str, Any]) -> None:
    """Give a step's pod the containers of KFP and Argo; in place.

    On grounds that are not exact it stays alone, and requests what a small machine has room for.
    """
    main = pod["spec"]["containers"][0]
    if not grounds.exact:
        requests = main["resources"].get("requests", {})
        requests.update({name: _MOST[name] for name in requests.keys() & _MOST.keys()})
        return
    pod["spec"]["initContainers"] = [_ended("init", EXECUTOR), _ended("kfp-launcher", LAUNCHER)]
    pod["spec"]["containers"].append(_ended("wait", EXECUTOR))
    driver = {
        "metadata": {"name": f"driver-{pod['metadata']['name']}"[:63].rstrip("-")},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [_ended("init", EXECUTOR)],
            "containers": [_ended("main", DRIVER), _ended("wait", EXECUTOR)],
        },
    }
    # That it is taken is what there is to know of it: what a driver does, kfp.local does here.
    grounds.core.create_namespaced_pod(grounds.namespace, driver, dry_run="All")


def _ended(name: str, resources: Resources) -> dict[str, Any]:
    """A container that ends at once."""
    return {
        "name": name,
        "image": IMAGE,
        "command": ["true"],
        "resources": resources,
        "securityContext": _NON_ROOT,
    }
