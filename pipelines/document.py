"""A compiled pipeline as its file holds it: what runs, and what it needs of Kubernetes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kfp_ddp.core.errors import InputError

NO_PIPELINE = "give the YAML that `kfp-ddp compile` or kfp's compiler wrote"
SUFFIXES = (".yaml", ".yml")


class Document(NamedTuple):
    """The two documents of a compiled pipeline."""

    spec: Mapping[str, Any]
    platforms: Mapping[str, Any]
    """Claims, secrets and such, by platform; empty for none."""

    @property
    def name(self) -> str:
        """What the pipeline is called."""
        return str(self.spec["pipelineInfo"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of its form, as the compiler describes them."""
        found: Mapping[str, Any] = (
            self.spec["root"].get("inputDefinitions", {}).get("parameters", {})
        )
        return found

    def programs(self) -> dict[str, str]:
        """The commands of its steps, by the labels of their executors."""
        executors = self.spec.get("deploymentSpec", {}).get("executors", {})
        return {
            label: " ".join(each.get("container", {}).get("command", []))
            for label, each in executors.items()
        }

    def body(self) -> dict[str, Any]:
        """Both as the API of KFP takes them in one object."""
        if not self.platforms:
            return dict(self.spec)
        return {"pipeline_spec": self.spec, "platform_spec": self.platforms}


def is_file(word: str) -> bool:
    """Whether a word names a compiled pipeline rather than a source.

    Raises:
        InputError: it names a Python file.
    """
    if word.endswith(".py") and "://" not in word:
        raise InputError(f"{word} is not compiled: kfp-ddp compile {word}, then give its YAML")
    return word.endswith(SUFFIXES) and "://" not in word


def read(file: Path) -> Document:
    """The pipeline that a file holds.

    Raises:
        InputError: it cannot be read, is no YAML, or no pipeline.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check its path") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is no YAML but bytes: {NO_PIPELINE}") from None
    return parsed(text, str(file))


def parsed(text: str, called: str) -> Document:
    """The pipeline in a text.

    Raises:
        InputError: it is no YAML, or no pipeline; naming what it is called.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        documents = [each for each in yaml.load_all(text, Loader=loader) if each is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise InputError(f"{called} is no YAML{where}: {NO_PIPELINE}") from None
    wrong = _what_is_wrong(documents)
    if wrong:
        raise InputError(f"{called} is no compiled pipeline, {wrong}: {NO_PIPELINE}")
    spec, *others = documents
    return Document(spec, others[0] if others else {})


def of_api(spec: Mapping[str, Any], called: str) -> Document:
    """The pipeline as the API of KFP tells it.

    Raises:
        InputError: it tells none; naming what it is called.
    """
    inner = spec.get("pipeline_spec", spec)
    wrong = _what_is_wrong([inner])
    if wrong:
        raise InputError(f"{called} is no pipeline of KFP 2, {wrong}")
    return Document(inner, spec.get("platform_spec", {}))


def defaults_of(component: Mapping[str, Any]) -> dict[str, Any]:
    """What the parameters of a component, or of the root, are where nobody gives them."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    return {name: told["defaultValue"] for name, told in declared.items() if "defaultValue" in told}


def _what_is_wrong(documents: list[Any]) -> str:
    spec = documents[0] if documents else None
    if spec is None:
        return "it is empty"
    if not isinstance(spec, Mapping):
        return "it holds no mapping"
    if spec.get("kind") in ("Workflow", "Pipeline", "PipelineVersion"):
        return f"it is a {spec['kind']} of Kubernetes"
    info, root = spec.get("pipelineInfo"), spec.get("root")
    if not isinstance(info, Mapping) or not info.get("name"):
        return "it has no pipelineInfo with a name"
    if not isinstance(root, Mapping) or not isinstance(root.get("dag"), Mapping):
        return "it has no root with steps"
    if len(documents) > 2 or not all(
        isinstance(each, Mapping) and "platforms" in each for each in documents[1:]
    ):
        return "its second document is none of platforms"
    return ""
