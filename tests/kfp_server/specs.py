"""What the server makes of a pipeline's YAML, and of the parameters that a run gives it."""

from typing import Any

import yaml

from tests.kfp_server.refusal import gateway

Spec = dict[str, Any]
NUMBERS = ("NUMBER_INTEGER", "NUMBER_DOUBLE")
KINDS = {
    "STRING": (str, "string"),
    "BOOLEAN": (bool, "bool"),
    "LIST": (list, "list"),
    "STRUCT": (dict, "struct"),
}


class NotYamlError(ValueError):
    """A file that the real server never answered."""


def read(data: bytes) -> Spec | None:
    """The pipeline of a YAML; None where it is none.

    Raises:
        NotYamlError: for what is no YAML at all.
    """
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = [one for one in yaml.load_all(data.decode(), Loader=loader) if one]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotYamlError from error
    if not documents or not isinstance(documents[0], dict) or "pipelineInfo" not in documents[0]:
        return None
    if len(documents) == 1:
        return dict(documents[0])
    return {"pipeline_spec": documents[0], "platform_spec": documents[1]}


def check_parameters(spec: Spec, given: dict[str, Any], doing: str) -> None:
    """Refuse what the recorded server refused, and take what it took: 1.5 for an int, too.

    Raises:
        RefusalError: 400, with its words.
    """
    before = (
        f"Failed to {doing}: Failed to generate the ExecutionSpec: invalid pipeline job inputs: "
        "Invalid input error"
    )
    root = spec.get("pipeline_spec", spec)["root"]
    inputs: Spec = root.get("inputDefinitions", {}).get("parameters", {})

    def refuse(why: str) -> None:
        raise gateway(400, before, why)

    for name, declared in inputs.items():
        optional = declared.get("isOptional") or "defaultValue" in declared
        if name not in given and not optional:
            refuse(
                f"parameter {name} is not optional, yet has neither default value nor user "
                "provided value"
            )
    if surplus := sorted(set(given) - set(inputs)):
        refuse(f"parameter(s) provided are not required by pipeline: {', '.join(surplus)}")
    for name, value in given.items():
        kind = inputs[name]["parameterType"]
        if kind in NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                refuse(
                    f"input parameter {name} requires type double or integer, but the parameter "
                    "value is not of number value type"
                )
        elif not isinstance(value, KINDS[kind][0]):
            refuse(
                f"input parameter {name} requires type {KINDS[kind][1]}, but the parameter value "
                f"is not of {KINDS[kind][1]} value type"
            )
        literals = inputs[name].get("literals")
        if literals and value not in literals:
            refuse(f"input parameter {name} does not match any of the allowed literal values")
