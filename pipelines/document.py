"""Read compiled pipelines: KFP's specification and its Kubernetes platform document."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import LARGEST_YAML, yaml_of

NO_PIPELINE = "give the YAML that `kfp-ddp compile` or kfp's compiler wrote"
SUFFIXES = (".yaml", ".yml")


class Document(NamedTuple):
    """The two documents of a compiled pipeline."""

    spec: Mapping[str, Any]
    platforms: Mapping[str, Any]
    """PVCs, secrets etc. by platform; may be empty."""

    @property
    def name(self) -> str:
        """Name of the pipeline."""
        return str(self.spec["pipelineInfo"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of its form by name, as the compiler describes them."""
        declared: Mapping[str, Any] = self.spec["root"].get("inputDefinitions", {})
        return dict(declared.get("parameters", {}))

    def programs(self) -> dict[str, str]:
        """Return the commands of its steps, with arguments, by executor label."""
        programs = {}
        for label, container in self._containers().items():
            words = [*container.get("command", []), *container.get("args", [])]
            programs[label] = " ".join(words)
        return programs

    def _containers(self) -> dict[str, Mapping[str, Any]]:
        executors = self.spec.get("deploymentSpec", {}).get("executors", {})
        return {label: executor.get("container", {}) for label, executor in executors.items()}

    def images(self) -> list[str]:
        """Return the images of its steps, and those in the defaults of their inputs."""
        inputs = map(defaults_of, self.spec.get("components", {}).values())
        places = [*self._containers().values(), *inputs]
        return sorted({str(place["image"]) for place in places if "image" in place})

    def values(self) -> list[Any]:
        """Return the values that are stored in it: defaults, constants, environment variables."""
        parts = json.dumps([self.spec["root"], self.spec.get("components")])
        variables = [{"env": container.get("env")} for container in self._containers().values()]
        return [json.loads(parts, object_hook=_without_types), variables]

    def body(self) -> dict[str, Any]:
        """Return the object that KFP's API takes."""
        if not self.platforms:
            return dict(self.spec)
        return {"pipeline_spec": self.spec, "platform_spec": self.platforms}


def is_file(word: str) -> bool:
    """Return whether a word names a compiled pipeline; raise InputError for a Python file."""
    if "://" in word:
        return False
    if word.endswith(".py"):
        raise InputError(f"{word} is not compiled: kfp-ddp compile {word}, then give its YAML")
    return word.endswith(SUFFIXES)


def program_of(source: str | Path, pipeline: Any) -> tuple[str, Any]:
    """Return source and pipeline; the source may be a compiled pipeline."""
    word = str(source)
    if not is_file(word):
        return word, pipeline
    if pipeline:
        raise InputError(f"{word} and --pipeline are two pipelines: give one of them")
    return "", word


def read(file: Path) -> Document:
    """Return the pipeline in a file; raise InputError if there is none."""
    return parsed(text_of(file, NO_PIPELINE), str(file))


def text_of(file: Path, advice: str) -> str:
    """Return the content of a YAML file; raise InputError if it cannot be read."""
    try:
        with file.open(encoding="utf-8") as stream:
            return stream.read(LARGEST_YAML + 1)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check its path") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not YAML but bytes: {advice}") from None


def parsed(text: str, called: str) -> Document:
    """Return the pipeline in a text; raise InputError, with the name `called`, if none."""
    try:
        documents = yaml_of(text, several=True)
    except InputError as error:
        raise InputError(f"{called} {error}: {NO_PIPELINE}") from None
    documents = [document for document in documents if document is not None]
    problem = _problem(documents)
    if problem:
        raise InputError(f"{called} is not a compiled pipeline, {problem}: {NO_PIPELINE}")
    spec, *others = documents
    return Document(spec, others[0] if others else {})


def from_api(spec: Mapping[str, Any], called: str) -> Document:
    """Return the pipeline in an object of KFP's API; see `parsed`."""
    inner = spec.get("pipeline_spec", spec)
    if problem := _problem([inner]):
        raise InputError(f"{called} is not a KFP 2 pipeline, {problem}")
    return Document(inner, spec.get("platform_spec", {}))


def _without_types(part: dict[str, Any]) -> Any:
    """Return the value that a part of a specification wraps, or the part without descriptions."""
    for wrapper in ("constant", "runtimeValue", "defaultValue"):
        if wrapper in part:
            return part[wrapper]
    return {name: one for name, one in part.items() if name != "description"}


def defaults_of(component: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the parameters of a component or of the root."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    return {name: spec["defaultValue"] for name, spec in declared.items() if "defaultValue" in spec}


def _problem(documents: list[Any]) -> str:
    """Return why documents are no compiled pipeline; '' if they are."""
    spec, *others = documents or [None]
    if spec is None:
        return "it is empty"
    if not isinstance(spec, Mapping):
        return "it is not a mapping"
    if spec.get("kind") in ("Workflow", "Pipeline", "PipelineVersion"):
        return f"it is a {spec['kind']} of Kubernetes"
    info = spec.get("pipelineInfo")
    if not isinstance(info, Mapping) or not info.get("name"):
        return "it has no pipelineInfo with a name"
    root = spec.get("root")
    if not isinstance(root, Mapping) or not isinstance(root.get("dag"), Mapping):
        return "it has no root with steps"
    if len(others) > 1 or not all(map(_has_platforms, others)):
        return "its second document has no platforms"
    return ""


def _has_platforms(document: Any) -> bool:
    return isinstance(document, Mapping) and "platforms" in document
