"""What a user set on a task, handed to the component instead of, or besides, its own pod."""

import json
from typing import Any

from google.protobuf import json_format

OURS = frozenset({"KFP_POD_NAME", "KFP_POD_UID", "STEP_GRACE"})
# Passthroughs that are one field of the pod's spec, by that field.
WHOLE = {
    "KUBERNETES_TOLERATIONS": "tolerations",
    "KUBERNETES_NODE_SELECTOR": "nodeSelector",
    "KUBERNETES_AFFINITY": "affinity",
}


def pass_through(pod: dict[str, Any], command: list[str], component: Any) -> None:
    """Fill the component's dsl.TaskConfig from its pod, as KFP's driver does; in place.

    What is not applied to the task as well is taken from the pod.
    """
    spec = json_format.MessageToDict(component)
    inputs = spec.get("inputDefinitions", {}).get("parameters", {})
    name = next((n for n, i in inputs.items() if i["parameterType"] == "TASK_CONFIG"), None)
    if name is None:
        return
    fields = {
        item["field"]: item.get("applyToTask", False) for item in spec["taskConfigPassthroughs"]
    }
    container = pod["spec"]["containers"][0]
    config: dict[str, Any] = {}
    if "KUBERNETES_VOLUMES" in fields:
        config["volumes"] = list(pod["spec"]["volumes"])
        config["volumeMounts"] = list(container["volumeMounts"])
        if not fields["KUBERNETES_VOLUMES"]:
            pod["spec"]["volumes"], container["volumeMounts"] = [], []
    for passthrough, part in WHOLE.items():
        if passthrough in fields and part in pod["spec"]:
            config[part] = pod["spec"][part]
            if not fields[passthrough]:
                del pod["spec"][part]
    if "RESOURCES" in fields:
        config["resources"] = container["resources"]
        if not fields["RESOURCES"]:
            container["resources"] = {}
    if "ENV" in fields:
        config["env"] = [item for item in container["env"] if item["name"] not in OURS]
        if not fields["ENV"]:
            container["env"] = [item for item in container["env"] if item["name"] in OURS]
    place = command.index("--executor_input") + 1
    executor_input = json.loads(command[place])
    executor_input["inputs"]["parameterValues"][name] = config
    command[place] = json.dumps(executor_input)
