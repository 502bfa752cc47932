"""The contract of Model Registry's API, read from its generated client, `mr_openapi`."""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import mr_openapi
from mr_openapi import ModelRegistryServiceApi


@dataclass(frozen=True)
class Operation:
    """An operation of the API."""

    name: str
    method: str
    path: str
    query: frozenset[str]
    body: str
    """Name of its type; '' for none."""
    answers: dict[int, str]

    def match(self, method: str, path: str) -> dict[str, str] | None:
        """Return the parameters in a path, None for another operation."""
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        match = re.fullmatch(pattern, path) if method == self.method else None
        return match.groupdict() if match else None


@cache
def operations() -> tuple[Operation, ...]:
    """Return all operations in the order of the client."""
    return tuple(
        _operation(name.removesuffix("_with_http_info"))
        for name in vars(ModelRegistryServiceApi)
        if name.endswith("_with_http_info")
    )


def _operation(name: str) -> Operation:
    call = getattr(ModelRegistryServiceApi, name)
    sent = inspect.getsource(getattr(ModelRegistryServiceApi, f"_{name}_serialize"))
    parameters = list(inspect.signature(call).parameters.values())
    bodies = [one for one in parameters if f"_body_params = {one.name}\n" in sent]
    return Operation(
        name,
        _only(r'method="(\w+)"', sent),
        _only(r'resource_path="([^"]+)"', sent),
        frozenset(re.findall(r'_query_params\.append\(\s*\(\s*"(\w+)"', sent)),
        _type_name(bodies[0].annotation) if bodies else "",
        {
            int(status): kind
            for status, kind in re.findall(r'"(\d{3})": "(\w+)"', inspect.getsource(call))
        },
    )


def _only(pattern: str, text: str) -> str:
    (match,) = re.findall(pattern, text)
    return str(match)


def _type_name(annotation: Any) -> str:
    inner = getattr(annotation, "__origin__", annotation)
    return str(getattr(inner, "__name__", inner))


def mismatch(kind: str, content: Any) -> str:
    """Return what does not fit a type of the contract; '' if all does."""
    try:
        parsed = getattr(mr_openapi, kind).from_dict(content)
    except (ValueError, AttributeError, TypeError) as error:
        return f"{kind}: {' '.join(str(error).split())[:300]}"
    fields = type(getattr(parsed, "actual_instance", parsed)).model_fields
    unknown = content.keys() - {field.alias or name for name, field in fields.items()}
    return f"{kind} has no such {', '.join(sorted(unknown))}" if unknown else ""
