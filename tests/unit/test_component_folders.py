"""The folders of components follow the rules of kubeflow/pipelines-components.

These are in its scripts validate_metadata, check_imports and validate_components (July 2026), which
are not a package.
"""

import ast
import datetime
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

COMPONENTS = Path(__file__).parents[2] / "components"
FOLDERS = sorted(path.parent for path in COMPONENTS.glob("*/component.py"))
VERSION = r"^(>=|<=|==)\d+\.\d+\.\d+$"
DEPENDENCY = {
    "type": "object",
    "required": ["name", "version"],
    "properties": {"name": {"type": "string"}, "version": {"type": "string", "pattern": VERSION}},
}
REQUIRED = ["name", "stability", "dependencies", "lastVerified"]  # in this order
PIPELINES = {"properties": {"name": {"const": "Pipelines"}}}
SCHEMA = {
    "type": "object",
    "required": REQUIRED,
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "stability": {"enum": ["experimental", "alpha", "beta", "stable"]},
        "dependencies": {
            "type": "object",
            "required": ["kubeflow"],
            "additionalProperties": False,
            "properties": {
                "kubeflow": {"type": "array", "items": DEPENDENCY, "contains": PIPELINES},
                "external_services": {"type": "array", "items": DEPENDENCY},
            },
        },
        "lastVerified": {},
        "tags": {"type": "array", "items": {"type": "string"}},
        "links": {"type": "object"},
    },
}
components = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@components
def test_metadata_is_valid(folder: Path) -> None:
    metadata: dict[str, Any] = yaml.safe_load((folder / "metadata.yaml").read_text())
    jsonschema.validate(metadata, SCHEMA)
    assert [field for field in metadata if field in REQUIRED] == REQUIRED
    verified = metadata["lastVerified"]
    assert isinstance(verified, datetime.datetime)
    assert verified.tzinfo is not None
    assert metadata["name"] == folder.name


@components
def test_folder_has_owners_readme_and_function(folder: Path) -> None:
    assert re.search(r"^approvers:\n- *\S", (folder / "OWNERS").read_text(), re.M)
    assert (folder / "README.md").read_text().startswith(f"# {folder.name}\n")
    module = importlib.import_module(f"kfp_ddp.components.{folder.name}.component")
    assert getattr(module, folder.name).component_spec.name == folder.name.replace("_", "-")


@components
def test_component_imports_only_kfp_and_the_standard_library(folder: Path) -> None:
    """Authors import it without our other dependencies."""
    body = ast.parse((folder / "component.py").read_text()).body
    imported = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in imported}
    assert roots <= sys.stdlib_module_names | {"kfp"}
    assert "__future__" not in roots  # annotations would become strings, which KFP cannot read
