"""The floors of CONTRIBUTING.md: what is imported lies below, and rooms stand in no circle."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = (
    ("base",),
    ("training", "config"),
    ("components.shared",),
    ("components",),
    ("pipelines",),
)
"""From the ground up; above them is all else of the package, which people call."""
BRINGS_A_DATASET = {"kfp_ddp.components.shared.each_node", "kfp_ddp.components.shared.in_use"}
"""The two that stand on the sync: a dataset that each node brings is synced there, and held."""


def modules() -> Iterator[tuple[str, Path]]:
    links = {path for path in (ROOT / "kfp_ddp").iterdir() if path.is_symlink()}
    for folder in ("kfp_ddp", "components", "pipelines", "training"):
        for path in (ROOT / folder).rglob("*.py"):
            if not links & {*path.parents}:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                name = name.removesuffix(".__init__").removeprefix("kfp_ddp").lstrip(".")
                yield f"kfp_ddp.{name}".rstrip("."), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


@cache
def arrows() -> list[tuple[str, str]]:
    pairs = ((name, other) for name, path in modules() for other in imported(path))
    ours = ((name, other) for name, other in pairs if other.startswith("kfp_ddp."))
    return [pair for pair in ours if pair[1] != "kfp_ddp.__version__"]


def floor(module: str) -> int:
    inner = f"{module.removeprefix('kfp_ddp.')}."
    at = (n for n, rooms in enumerate(FLOORS) if any(inner.startswith(f"{r}.") for r in rooms))
    return next(at, len(FLOORS))


def room(module: str) -> str:
    """A component, or a folder or module of what people call."""
    parts = module.split(".")
    return ".".join(parts[1:3] if parts[1:2] == ["components"] else parts[1:2])


def test_no_module_imports_what_stands_above_it() -> None:
    assert len(arrows()) > 1000
    up = [
        f"{name} imports {other}"
        for name, other in arrows()
        if floor(other) > floor(name)
        and not (name in BRINGS_A_DATASET and other.startswith("kfp_ddp.components.data_sync."))
    ]
    assert up == []


def test_rooms_stand_in_no_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for name, other in arrows():
        if name not in BRINGS_A_DATASET and room(name) != room(other):
            rooms.setdefault(room(name), set()).add(room(other))
    assert list(TopologicalSorter(rooms).static_order())
