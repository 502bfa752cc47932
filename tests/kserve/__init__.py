"""KServe's own definition of an InferenceService, to hold manifests to.

The file is config/crd/full/serving.kserve.io_inferenceservices.yaml of kserve/kserve at v0.20.0
(commit 1fb7810, Apache-2.0) as JSON, whole but for the descriptions.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition, as `kubectl apply` takes it."""
    content = (Path(__file__).parent / "inferenceservices.json.gz").read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(content))
    return found


def faults(manifest: dict[str, Any]) -> list[str]:
    """What an API server with strict validation would refuse of an InferenceService."""
    version = definition()["spec"]["versions"][0]
    assert manifest["apiVersion"] == f"serving.kserve.io/{version['name']}"
    validator = Draft202012Validator(_closed(version["schema"]["openAPIV3Schema"]))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def _closed(schema: Any) -> Any:
    """The schema with names that it does not know refused, as for `fieldValidation=Strict`."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
