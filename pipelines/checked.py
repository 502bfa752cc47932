"""Arguments of a pipeline, checked before it runs by the code of the step that would in the run."""

from collections.abc import Mapping
from typing import Any

from kfp_ddp.checks.preflight.settled import settled
from kfp_ddp.pipelines.document import Document, defaults_of


def checked(pipeline: Document, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `preflight` gets, as it will find it good; nothing for a pipeline without that step.

    Args:
        pipeline: The pipeline.
        given: Its arguments, completed.

    Raises:
        InputError: what preflight would refuse.
    """
    task = pipeline.spec["root"]["dag"].get("tasks", {}).get("preflight")
    if task is None:
        return {}
    component = pipeline.spec.get("components", {}).get(task["componentRef"]["name"], {})
    program = pipeline.programs().get(component.get("executorLabel"), "")
    if "kfp_ddp.checks.preflight" not in program:
        return {}
    inputs = _inputs(task, component, {**defaults_of(pipeline.spec["root"]), **given})
    settled(inputs)
    return inputs


def _inputs(
    task: Mapping[str, Any], component: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What a step of the root gets where its pipeline is given this."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    inputs = defaults_of(component)
    for name, wired in task.get("inputs", {}).get("parameters", {}).items():
        if "componentInputParameter" in wired:
            inputs[name] = given[wired["componentInputParameter"]]
        elif "runtimeValue" in wired:
            inputs[name] = wired["runtimeValue"]["constant"]
    whole = [name for name, told in declared.items() if told["parameterType"] == "NUMBER_INTEGER"]
    return inputs | {name: int(inputs[name]) for name in whole if name in inputs}
