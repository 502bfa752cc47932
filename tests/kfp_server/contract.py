"""KFP's published contract: the operations and types of the package kfp-server-api."""

import functools
import inspect
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import kfp_server_api
from kfp_server_api import api, models

PLAIN: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": (int, float)}
LONG = ("max_concurrency", "interval_second")
"""Numbers of 64 bits: texts in the contract, which the server takes as numbers too."""


@dataclass(frozen=True)
class Operation:
    """A method of a service."""

    name: str
    method: str
    path: re.Pattern[str]
    """Its groups are the values in the path."""
    query: frozenset[str]
    body: str
    """Type of the JSON that is sent; '' for none, `file` for an upload."""
    answer: str
    """Type of the JSON that comes back."""


@functools.cache
def operations() -> tuple[Operation, ...]:
    """All of them; those whose path has fewer values first."""
    methods = []
    for service in (one for name, one in vars(api).items() if name.endswith("ServiceApi")):
        for name, method in vars(service).items():
            if name.endswith("_with_http_info"):
                methods.append(_operation(name.removesuffix("_with_http_info"), method))
    return tuple(sorted(methods, key=lambda one: one.path.groups))


def _operation(name: str, method: Any) -> Operation:
    source = inspect.getsource(method)
    called = re.search(r"call_api\(\s+'([^']+)', '(\w+)'", source)
    body = re.search(r"body_params = local_var_params\['(\w+)'\]", source)
    sent = re.search(r"local_var_files\['(\w+)'\]", source)
    answer = re.search(r"response_type=(?:'(.+?)'|None)", source)
    assert called, name
    assert answer, name
    pattern = re.sub(r"\{([\w.]+)\}", lambda one: f"(?P<{one[1].split('.')[-1]}>[^/:]+)", called[1])
    kind = "file" if sent else ""
    if body:
        typed = re.search(rf":type {body[1]}: (\S+)", source)
        assert typed, name
        kind = typed[1]
    return Operation(
        re.sub(r"^\w+?_service_", "", name),
        called[2],
        re.compile(pattern),
        frozenset(re.findall(r"query_params\.append\(\('(\w+)'", source)),
        kind,
        answer[1] or "object",
    )


def faults(value: Any, kind: str, at: str) -> list[str]:
    """What of a JSON value does not fit its type; empty where all does.

    Args:
        value: As parsed.
        kind: A type as the package writes them: str, list[V2beta1Run], dict(str, object).
        at: Where the value is, for messages.
    """
    if kind == "object" or value is None:
        return []
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{at} should be a list"]
        return [each for n, one in enumerate(value) for each in faults(one, inner[1], f"{at}[{n}]")]
    if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            return [f"{at} should be an object"]
        return [each for k, one in value.items() for each in faults(one, inner[1], f"{at}.{k}")]
    if at.endswith(LONG) and isinstance(value, int):
        return []
    if kind in PLAIN:
        fits = isinstance(value, PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{at}={value!r} should be {kind}"]
    if kind == "datetime":
        return [] if _time(value) else [f"{at}={value!r} should be a time"]
    model = getattr(models, kind)
    if known := getattr(model, "allowable_values", None):
        return [] if value in known else [f"{at}={value!r} should be one of {known}"]
    if not isinstance(value, dict):
        return [f"{at} should be an object of {kind}"]
    fields = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    return [
        fault
        for key, inside in value.items()
        for fault in (
            faults(inside, fields[key], f"{at}.{key}")
            if key in fields
            else [f"{at}.{key} is no field of {kind}"]
        )
    ]


def _time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


VERSION = kfp_server_api.__version__
