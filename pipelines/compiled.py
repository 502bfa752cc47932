"""Compile the pipelines, and tell whether the committed documents still say what they say."""

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.struct_pb2 import Value
from kfp import compiler, dsl
from kfp.pipeline_spec.pipeline_spec_pb2 import ParameterType

from kfp_ddp.checks.preflight.parameters import choices
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.pipelines import NAMES, own, picture
from kfp_ddp.pipelines.images import Images

SUFFIXES = (".yaml", ".yml", ".svg")


def write(
    directory: Path,
    images: Images = Images(),  # noqa: B008
    restricted: bool = False,
    names: Sequence[str] = NAMES,
) -> list[Path]:
    """Compile pipelines of ours to `<directory>/<name>.yaml`, a picture beside each.

    Args:
        directory: Made if need be.
        images: What steps and workers run.
        restricted: Whether it is for namespaces under PodSecurity `restricted`.
        names: Of the pipelines.

    Returns:
        The paths of the YAML files.
    """
    written = []
    for name in names:
        pipeline = getattr(importlib.import_module(f"kfp_ddp.pipelines.{name}"), name)
        _close_choices(pipeline)
        _keep_own_resources(pipeline)
        _loop_over_mappings(pipeline)
        path = _compile(pipeline, directory / f"{name}.yaml", images, restricted)
        path.with_suffix(".svg").write_text(picture.svg(path))
        written.append(path)
    return written


def write_own(
    file: Path,
    directory: Path,
    images: Images = Images(),  # noqa: B008
    restricted: bool = False,
) -> list[Path]:
    """Compile every pipeline that a file defines to `<directory>/<function>.yaml`; the paths.

    The rest is as in `write`.

    Raises:
        InputError: the file defines none, or one of them cannot be compiled; one line.
    """
    written = []
    for name, pipeline in own.pipelines_of(file).items():
        try:
            written.append(_compile(pipeline, directory / f"{name}.yaml", images, restricted))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{name} of {file} cannot be compiled: {one_line(error, 2000)}"
            ) from error
    return written


def _compile(pipeline: Any, path: Path, images: Images, restricted: bool) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_root(pipeline, restricted)
    compiler.Compiler().compile(pipeline, package_path=str(path))
    path.write_text(images.put_into(path.read_text()))
    return path


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


def _loop_over_mappings(pipeline: Any) -> None:
    """Let an item of a loop of ours be a mapping; the SDK takes items of any list for text."""
    for component in pipeline.pipeline_spec.components.values():
        for name, parameter in component.input_definitions.parameters.items():
            if name.endswith("-loop-item"):
                parameter.parameter_type = ParameterType.STRUCT


def _refuse_root(pipeline: Any, restricted: bool) -> None:
    """Let every step say that it does not run as root, which KFP leaves out; or none of them.

    Not always: an image of one's own may run as root where nothing forbids that.
    """
    names = pipeline.pipeline_spec.deployment_spec["executors"].keys()
    executors = pipeline.platform_spec.platforms["kubernetes"].deployment_spec.executors
    for name in names:
        if restricted:
            executors[name].update({"securityContext": {"runAsNonRoot": True}})
        elif name in executors:
            executors[name].fields.pop("securityContext", None)


def differences(directory: Path, names: Sequence[str] = NAMES) -> list[str]:
    """One line for each document in `directory` that is missing, stale or has no pipeline."""
    found = []
    with tempfile.TemporaryDirectory() as fresh:
        for path in write(Path(fresh), names=names):
            committed = directory / path.name
            found += _difference(committed, path, f"pipelines/{path.stem}.py")
            drawn, drawing = committed.with_suffix(".svg"), path.with_suffix(".svg")
            if not drawn.exists() or drawn.read_text() != drawing.read_text():
                found.append(f"{drawn}: is not the picture of pipelines/{path.stem}.py")
    orphans = {p.stem for p in directory.glob("*") if p.suffix in SUFFIXES} - set(NAMES)
    return found + [f"{directory / name}.yaml: has no pipeline" for name in sorted(orphans)]


def differences_of_own(
    file: Path,
    directory: Path,
    images: Images = Images(),  # noqa: B008
    restricted: bool = False,
) -> list[str]:
    """One line for each document of a file's pipelines that is missing or stale in `directory`."""
    with tempfile.TemporaryDirectory() as fresh:
        return [
            line
            for path in write_own(file, Path(fresh), images, restricted)
            for line in _difference(directory / path.name, path, str(file))
        ]


def _difference(committed: Path, fresh: Path, source: str) -> list[str]:
    if not committed.exists():
        return [f"{committed}: missing"]
    same = _documents(committed) == _documents(fresh)
    return [] if same else [f"{committed}: differs from {source}"]


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
