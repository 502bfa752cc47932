"""The layers of CONTRIBUTING.md: imports go down only, and there are no import cycles."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = (
    {"core"},
    {"training"},
    {"storage", "k8s"},
    {"jobs", "datasets", "models", "report", "runs", "evaluation", "export", "checks"},
    {"components"},
    {"pipelines"},
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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
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


def test_no_module_imports_a_layer_above_its_own() -> None:
    assert len(arrows()) > 1000
    assert [f"{a} imports {b}" for a, b in arrows() if layer(b) > layer(a)] == []


def test_every_room_of_the_layers_exists() -> None:
    rooms = {room(name) for name, _ in modules()}
    assert set().union(*LAYERS) <= rooms


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, other in arrows():
        if room(name) != room(other):
            graph.setdefault(room(name), set()).add(room(other))
    assert list(TopologicalSorter(graph).static_order())


def test_components_are_a_signature_and_one_call() -> None:
    for folder in (path.parent for path in (ROOT / "components").glob("*/component.py")):
        sources = {path.name for path in folder.glob("*.py")}
        assert sources == {"__init__.py", "component.py"}, folder
