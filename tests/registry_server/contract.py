"""The contract of Model Registry's API, read from the client that was generated of it.

Each operation of `mr_openapi` says its method, path, query, the type of its body and the types of
its answers by status.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import mr_openapi
from mr_openapi import ModelRegistryServiceApi


@dataclass(frozen=True)
class Operation:
    """One of the API."""

    name: str
    method: str
    path: str
    query: frozenset[str]
    body: str
    """Name of its type; '' for none."""
    answers: dict[int, str]

    def match(self, method: str, path: str) -> dict[str, str] | None:
        """The parameters in a path, if this is the operation that was asked for."""
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        found = re.fullmatch(pattern, path) if method == self.method else None
        return found.groupdict() if found else None


@cache
def operations() -> tuple[Operation, ...]:
    """All of them, in the order of the client."""
    return tuple(
        _operation(name.removesuffix("_with_http_info"))
        for name in vars(ModelRegistryServiceApi)
        if name.endswith("_with_http_info")
    )


def _operation(name: str) -> Operation:
    call = getattr(ModelRegistryServiceApi, name)
    sent = inspect.getsource(getattr(ModelRegistryServiceApi, f"_{name}_serialize"))
    given = list(inspect.signature(call).parameters.values())
    bodies = [each for each in given if f"_body_params = {each.name}\n" in sent]
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
    (found,) = re.findall(pattern, text)
    return str(found)


def _type_name(annotation: Any) -> str:
    inner = getattr(annotation, "__origin__", annotation)
    return str(getattr(inner, "__name__", inner))


def departs(kind: str, said: Any) -> str:
    """What of an object the type of the contract does not have or take; '' where it fits."""
    try:
        found = getattr(mr_openapi, kind).from_dict(said)
    except (ValueError, AttributeError, TypeError) as error:
        return f"{kind}: {' '.join(str(error).split())[:300]}"
    fields = type(getattr(found, "actual_instance", found)).model_fields
    lost = said.keys() - {field.alias or name for name, field in fields.items()}
    return f"{kind} has no such {', '.join(sorted(lost))}" if lost else ""
