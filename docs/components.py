"""The files components/*/component.yaml, for `components.load_component_from_url` of KFP."""

import copy
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kfp import compiler

from kfp_ddp.core.container_images import Images
from kfp_ddp.jobs.shipping.own_package import alone
from kfp_ddp.pipelines.compiled import PROGRAM


def component_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each of a checkout."""
    for path in sorted(root.glob("components/*/component.py")):
        name = path.parent.name
        yield path.with_name("component.yaml"), component_file(name)


def component_file(name: str) -> str:
    """Return a component in public images, with a start program that reads the source itself."""
    module = importlib.import_module(f"kfp_ddp.components.{name}.component")
    component = copy.deepcopy(getattr(module, name))
    container = component.component_spec.implementation.container
    container.command = alone(PROGRAM, "trainer" if "/trainer:" in container.image else "launcher")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "component.yaml"
        compiler.Compiler().compile(component, str(path))
        return Images().put_into(path.read_text())
