"""The layers of CONTRIBUTING.md, and the rules of kubeflow/pipelines-components for folders.

These are in its scripts validate_metadata, check_imports and validate_components (July 2026), which
are not a package.
"""

import ast
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import docstring_parser
import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from docs.component_readmes import MARKER, function_of, title

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "components").glob("*/component.py"))
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
def test_folder_has_owners_readme_and_one_module_with_its_function(folder: Path) -> None:
    modules = {path.name for path in folder.glob("*.py")}
    assert modules - {"example_pipelines.py"} == {"__init__.py", "component.py"}
    assert re.search(r"^approvers:\n- *\S", (folder / "OWNERS").read_text(), re.M)
    readme = (folder / "README.md").read_text()
    assert re.findall(r"^#+ (.*) .+$", readme.partition(MARKER)[0], re.M) == [
        title(folder.name),
        *("Overview", "Inputs", "Outputs"),
        *(["Usage Examples"] if (folder / "example_pipelines.py").exists() else []),
        "Metadata",
    ]
    module = importlib.import_module(f"kfp_ddp.components.{folder.name}.component")
    component = getattr(module, folder.name)
    assert component.component_spec.name == folder.name.replace("_", "-")
    # Its check refuses an import of our package at the top, but not one of the same folder.
    assert f"\nfrom .component import {folder.name}\n" in (folder / "__init__.py").read_text()
    package = importlib.import_module(f"kfp_ddp.components.{folder.name}")
    assert package.__all__ == [folder.name]
    assert getattr(package, folder.name) is component


@components
def test_every_input_is_described_in_one_line(folder: Path) -> None:
    """The generator of READMEs puts it into a table as it is."""
    function = function_of(folder)
    about = docstring_parser.parse(ast.get_docstring(function) or "")
    assert {one.arg_name for one in about.params} == {one.arg for one in function.args.args}
    returned = about.returns.description if about.returns else ""
    for text in (*(one.description for one in about.params), returned):
        assert "\n" not in (text or ""), text
    assert "\\\n" not in (folder / "component.py").read_text()


@components
def test_component_imports_only_kfp_and_the_standard_library(folder: Path) -> None:
    """Authors import it without our other dependencies."""
    body = ast.parse((folder / "component.py").read_text()).body
    imported = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in body if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in imported}
    assert roots <= sys.stdlib_module_names | {"kfp"}
    assert "__future__" not in roots  # annotations would become strings, which KFP cannot read


FINDER = """
import importlib, json, sys

modules, blocked = json.loads(sys.stdin.read())

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Finder())
for module in modules:
    importlib.import_module(module)
"""


@pytest.mark.parametrize("image", ["launcher", "trainer"])
def test_steps_import_only_packages_of_their_image(image: str) -> None:
    texts = [(folder / "component.py").read_text() for folder in FOLDERS]
    steps = [
        re.search(r"from (kfp_ddp\.\S+) import run", text) for text in texts if f"/{image}:" in text
    ]
    lock = (ROOT / "images" / image / "requirements.lock").read_text()
    locked = set(re.findall(r"^([\w.-]+)==", lock, re.M)) | {"kfp-ddp"}
    blocked = [
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if locked.isdisjoint(re.sub(r"[-_.]+", "-", package).lower() for package in packages)
    ]
    request = json.dumps([[step[1] for step in steps if step], blocked])
    assert len(steps) > 1
    assert "psutil" in blocked
    subprocess.run([sys.executable, "-c", FINDER], input=request, text=True, check=True)


LAYERS = (
    {"core"},
    {"pictures", "storage", "k8s"},
    {"training"},
    {"jobs"},
    {"datasets"},
    {"models"},
    {"report", "rollout"},
    {"runs"},
    {"evaluation"},
    {"export", "plan"},
    {"checks", "sweep"},
    {"components"},
    {"pipelines"},
    {"local"},
    {"client"},
)
"""From the bottom up. All other rooms of the package are what people call, above these."""


def modules() -> Iterator[tuple[str, Path]]:
    links = {path for path in (ROOT / "kfp_ddp").iterdir() if path.is_symlink()}
    for folder in ("kfp_ddp", "components", "pipelines", "training"):
        for path in (ROOT / folder).rglob("*.py"):
            if not links & {*path.parents}:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                name = name.removesuffix(".__init__").removeprefix("kfp_ddp").lstrip(".")
                yield f"kfp_ddp.{name}".rstrip("."), path


def imports(path: Path) -> Iterator[str]:
    yield from imports_in(ast.parse(path.read_text()), path)


def imports_in(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level and path.parent in FOLDERS and path.name == "__init__.py":
                module = f"kfp_ddp.components.{path.parent.name}.{module}"
            else:
                assert node.level == 0, f"{path} imports by a relative name"
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def arrows() -> list[tuple[str, str]]:
    pairs = ((name, other) for name, path in modules() for other in imports(path))
    internal = ((name, other) for name, other in pairs if other.startswith("kfp_ddp."))
    return [pair for pair in internal if pair[1] != "kfp_ddp.__version__"]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer(module: str) -> int:
    return next((n for n, rooms in enumerate(LAYERS) if room(module) in rooms), len(LAYERS))


FREE_OF_TORCH = ("core", "pictures", "training.spec", "storage", "k8s", "datasets", "report")


def test_rooms_below_the_training_import_no_torch() -> None:
    """The launcher's image has no torch, and the command line has no time for it."""
    rooms = tuple(f"kfp_ddp.{name}." for name in FREE_OF_TORCH)
    free = [name for name, _ in modules() if f"{name}.".startswith(rooms)]
    assert {room(name) for name in free} == {name.split(".")[0] for name in FREE_OF_TORCH}
    request = json.dumps([free, ["torch"]])
    subprocess.run([sys.executable, "-c", FINDER], input=request, text=True, check=True)


def test_no_module_imports_a_layer_above_its_own() -> None:
    assert len(arrows()) > 1000
    assert [f"{a} imports {b}" for a, b in arrows() if layer(b) > layer(a)] == []


def test_models_and_jobs_do_not_know_each_other() -> None:
    pillars = {"models", "jobs"}
    both = [(a, b) for a, b in arrows() if {room(a), room(b)} == pillars]
    assert both == []


def test_every_room_of_the_layers_exists() -> None:
    rooms = {room(name) for name, _ in modules()}
    assert set().union(*LAYERS) <= rooms


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, other in arrows():
        if room(name) != room(other):
            graph.setdefault(room(name), set()).add(room(other))
    assert list(TopologicalSorter(graph).static_order())


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_files_do_not_import_each_other_in_a_circle() -> None:
    """Imports of types alone do not count."""
    names = {name for name, _ in modules()}
    graph: dict[str, set[str]] = {}
    for name, path in modules():
        body = [node for node in ast.parse(path.read_text()).body if not is_for_types(node)]
        for imported in imports_in(ast.Module(body, []), path):
            module = imported if imported in names else imported.rpartition(".")[0]
            if module not in (name, "kfp_ddp"):  # which exports what others import
                graph.setdefault(name, set()).add(module)
    assert list(TopologicalSorter(graph).static_order())
