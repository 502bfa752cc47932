"""Compile the pipelines, and tell whether the committed documents still say what they say."""

import importlib
import tempfile
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.struct_pb2 import Value
from kfp import compiler, dsl

from kfp_ddp.components.preflight.parameters import choices
from kfp_ddp.pipelines import NAMES, picture

REGISTRY = "ghcr.io/kfp-ddp"
SUFFIXES = (".yaml", ".yml", ".svg")


def write(directory: Path, registry: str = REGISTRY, restricted: bool = False) -> list[Path]:
    """Compile every pipeline to `<directory>/<name>.yaml`, its picture beside it; the paths.

    Args:
        directory: Made if need be.
        registry: Where the images of the steps are pulled from.
        restricted: Whether it is for namespaces under PodSecurity `restricted`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name in NAMES:
        pipeline = getattr(importlib.import_module(f"kfp_ddp.pipelines.{name}"), name)
        path = directory / f"{name}.yaml"
        _close_choices(pipeline)
        _keep_own_resources(pipeline)
        _refuse_root(pipeline, restricted)
        compiler.Compiler().compile(pipeline, package_path=str(path))
        path.write_text(path.read_text().replace(f"{REGISTRY}/", f"{registry.rstrip('/')}/"))
        path.with_suffix(".svg").write_text(picture.svg(path))
        written.append(path)
    return written


def _close_choices(pipeline: Any) -> None:
    """Let a pipeline's closed choices be a menu in the UI, and refused by the server otherwise.

    The SDK passes `literals` on (KFP 2.17), but has no way to declare them.
    """
    for name, parameter in pipeline.pipeline_spec.root.input_definitions.parameters.items():
        del parameter.literals[:]
        parameter.literals.extend(Value(string_value=choice) for choice in choices(name))


def _keep_own_resources(pipeline: Any) -> None:
    """Let what is set on a launching task be its own pod's, not that of its workers.

    KFP gives a pod nothing of what it passes through, and a namespace with a ResourceQuota takes no
    pod without resources. Its driver can do this, its SDK has no way to say it.
    """
    for component in pipeline.pipeline_spec.components.values():
        passed = component.task_config_passthroughs
        kept = [each for each in passed if each.field != dsl.TaskConfigField.RESOURCES]
        del passed[:]
        passed.extend(kept)


def _refuse_root(pipeline: Any, restricted: bool) -> None:
    """Let every step say that it does not run as root, which KFP leaves out; or none of them.

    Not always: an image of one's own may run as root where nothing forbids that.
    """
    names = pipeline.pipeline_spec.deployment_spec["executors"].keys()
    executors = pipeline.platform_spec.platforms["kubernetes"].deployment_spec.executors
    for name in names:
        context = {"securityContext": {"runAsNonRoot": True}} if restricted else {}
        executors[name].fields.pop("securityContext", None)
        executors[name].update(context)


def differences(directory: Path) -> list[str]:
    """One line for each document in `directory` that is missing, stale or has no pipeline."""
    found = []
    with tempfile.TemporaryDirectory() as fresh:
        for path in write(Path(fresh)):
            committed = directory / path.name
            if not committed.exists():
                found.append(f"{committed}: missing")
            elif _documents(committed) != _documents(path):
                found.append(f"{committed}: differs from pipelines/{path.stem}.py")
            drawn, drawing = committed.with_suffix(".svg"), path.with_suffix(".svg")
            if not drawn.exists() or drawn.read_text() != drawing.read_text():
                found.append(f"{drawn}: is not the picture of pipelines/{path.stem}.py")
    orphans = {p.stem for p in directory.glob("*") if p.suffix in SUFFIXES} - set(NAMES)
    return found + [f"{directory / name}.yaml: has no pipeline" for name in sorted(orphans)]


def _documents(path: Path) -> list[Any]:
    """The file's YAML documents, with the version of the compiling SDK masked."""
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except yaml.YAMLError:
        return []
    for document in documents:
        if isinstance(document, dict) and "sdkVersion" in document:
            document["sdkVersion"] = "masked"
    return documents
