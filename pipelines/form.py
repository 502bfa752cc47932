"""The form of a compiled pipeline: arguments from `key=value` words and YAML files, checked."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import kfp_ddp
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings, hint, rename
from kfp_ddp.core.text import yaml_of
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL
from kfp_ddp.models.weights_download import is_path
from kfp_ddp.pipelines.document import Document, defaults_of, text_of
from kfp_ddp.pipelines.document import read as read_document
from kfp_ddp.plan.form import MODELS, SUBJECTS
from kfp_ddp.plan.settings import Run, parse
from kfp_ddp.training.spec import model_file

COMPILED = Path(kfp_ddp.__file__).parent / "compiled"
KINDS: dict[str, tuple[type, str]] = {
    "STRING": (str, "text"),
    "NUMBER_INTEGER": (int, "a whole number"),
    "NUMBER_DOUBLE": (float, "a number"),
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, "a list such as [a, b]"),
    "STRUCT": (dict, "a mapping such as {a: 1}"),
}
"""Python type and description by KFP's name of a parameter type."""


Word = str | tuple[str, Any]
"""A setting: the text key=value, or a key and its value."""


class FormField(NamedTuple):
    """A parameter of the pipeline, and a setting in it if it is a mapping."""

    parameter: str
    setting: str = ""


class Form:
    """The parameters of a pipeline, and the models of settings that validate ours."""

    def __init__(self, pipeline: Document) -> None:
        self.pipeline = pipeline
        self.parameters = pipeline.parameters
        # Parameters of other pipelines may have the same names.
        ours = any("kfp_ddp." in program for program in pipeline.programs().values())
        self.subjects = {
            name: models for name, models in SUBJECTS.items() if ours and self._is(name, "STRUCT")
        }
        self._models = MODELS if ours else ()

    def read(
        self, file: Path | None, words: Iterable[Word], old: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return arguments of a YAML file, overridden by words; raise InputError.

        A key is a parameter of the pipeline, or a setting of one of its mappings: epochs, or
        training.cache_gb, or cache_gb if only one mapping has it. Such a setting is added to the
        mapping of the arguments `old`, or to the default. A mapping replaces it, as in KFP's API.
        """
        settings = _read_file(file) if file else []
        settings += [self._parse_word(w) if isinstance(w, str) else w for w in words]
        arguments = self.check(settings)
        if "training" in self.subjects:
            arguments = _with_file_contents(arguments)
        replaced = {name for name, value in settings if isinstance(value, dict)}
        for name in self.subjects.keys() & arguments.keys() - replaced:
            default = self.parameters[name].get("defaultValue", {})
            arguments[name] = {**(old or {}).get(name, default), **arguments[name]}
        return arguments

    def check(self, settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return validated arguments by name, the last value of each; raise InputError."""
        arguments: dict[str, Any] = {}
        for name, value in settings:
            if name in self.subjects and isinstance(value, dict):
                arguments.setdefault(name, {})
                for inner, one in value.items():
                    self._set(arguments, self._resolve(f"{name}.{inner}"), one)
            else:
                self._set(arguments, self._resolve(name), value)
        return arguments

    def check_complete(self, arguments: Mapping[str, Any]) -> None:
        """Raise InputError for a missing argument."""
        for name, spec in self.parameters.items():
            if name not in arguments and "defaultValue" not in spec and not spec.get("isOptional"):
                what = re.split(r"[.;:](?= |$)", spec.get("description", ""))[0]
                raise InputError(f"{name} is missing: give --set {name}=…{what and f' ({what})'}")

    def _is(self, name: str, kind: str) -> bool:
        return bool(self.parameters.get(name, {}).get("parameterType") == kind)

    def _parse_word(self, word: str) -> tuple[str, Any]:
        """Return name and value of `key=value`; the value is YAML, unless the setting is text."""
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"--set {word!r} is not a setting; write key=value, such as epochs=10")
        key = self._resolve(name)
        model, field = self._validator(key)
        if model is None:
            return name, text if self._is(key.parameter, "STRING") else _parse_yaml(text)
        annotation = model.model_fields[field].annotation
        if annotation is str or model.choices(field) or not text:
            return name, text
        value = _parse_yaml(text)
        listed = get_origin(annotation) is tuple and isinstance(value, str)
        return name, [value] if listed else value

    def _set(self, arguments: dict[str, Any], key: FormField, value: Any) -> None:
        model, name = self._validator(key)
        if model is not None and not (key.setting == "" and self._is_default(name, value)):
            value = model.checked(name, value)
        if key.setting:
            arguments.setdefault(key.parameter, {})[key.setting] = value
        else:
            arguments[key.parameter] = _typed(name, value, self.parameters[name])

    def _is_default(self, name: str, value: Any) -> bool:
        """Return whether a value is the default: 0 may mean the choice of the recipe."""
        spec = self.parameters[name]
        same = "defaultValue" in spec and spec["defaultValue"] == value
        return same and not isinstance(value, bool | dict)

    def _resolve(self, name: str) -> FormField:
        subject, dot, inner = name.partition(".")
        if dot and subject not in self.subjects:
            raise InputError(f"{name}: there is no {subject!r}{hint(subject, [*self.subjects])}")
        offered = {
            one: [field for model in models for field in model.offered()]
            for one, models in self.subjects.items()
            if not dot or one == subject
        }
        setting = inner if dot else name
        if setting not in self.parameters:
            everything = (model for models in self.subjects.values() for model in models)
            (setting,) = rename({setting: None}, *everything)
        if setting in self.parameters and (not dot or setting in offered[subject]):
            return FormField(setting)
        mappings = [one for one, fields in offered.items() if setting in fields]
        if not mappings:
            known = sorted({*self.parameters, *itertools.chain(*offered.values())})
            near = hint(setting, known) or ("" if self.subjects else f"; it has {', '.join(known)}")
            raise InputError(f"there is no setting {name!r}{near}")
        # A table of labels is meant more often than labels of pods, which are job.labels.
        if len(mappings) > 1 and (setting in JOB_INTERNAL or setting == "labels"):
            mappings.remove("job")
        if len(mappings) > 1:
            several = " or ".join(f"{one}.{setting}" for one in mappings)
            raise InputError(f"{name} is a setting of several things: write {several}")
        return FormField(mappings[0], setting)

    def _validator(self, key: FormField) -> tuple[type[Settings] | None, str]:
        """Return the model that validates a setting, if any, and its name there."""
        models = self.subjects[key.parameter] if key.setting else self._models
        name = key.setting or key.parameter
        return next((model for model in models if name in model.model_fields), None), name


@cache
def form_of(name: str) -> Form:
    """Return the form of our pipeline with this name, such as train_resnet."""
    return Form(read_document(COMPILED / f"{name}.yaml"))


def check_arguments(pipeline: Document, arguments: Mapping[str, Any]) -> Run | None:
    """Check arguments as `preflight` does; raise its InputError. None for a pipeline without it."""
    task = pipeline.spec["root"]["dag"].get("tasks", {}).get("preflight")
    if task is None:
        if "prediction" in Form(pipeline).subjects:
            given = {**defaults_of(pipeline.spec["root"]), **arguments}
            from kfp_ddp.evaluation.engine import job_fields  # few forms need it

            names = ("source", "bundle", "table", "prediction")
            PredictionRequest.from_inputs(*(given[name] for name in names))
            job_fields(given["job"], "image", given["backend"])
        return None
    component = pipeline.spec.get("components", {}).get(task["componentRef"]["name"], {})
    program = pipeline.programs().get(component.get("executorLabel"), "")
    if "kfp_ddp." not in program or not program.endswith("preflight"):
        return None
    return parse(_inputs(task, component, {**defaults_of(pipeline.spec["root"]), **arguments}))


def _inputs(
    task: Mapping[str, Any], component: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs of a step at the root for these arguments of the pipeline."""
    declared = component.get("inputDefinitions", {}).get("parameters", {})
    inputs = defaults_of(component)
    for name, source in task.get("inputs", {}).get("parameters", {}).items():
        if "componentInputParameter" in source:
            inputs[name] = arguments[source["componentInputParameter"]]
        elif "runtimeValue" in source:
            inputs[name] = source["runtimeValue"]["constant"]
    integers = {
        name for name, kind in declared.items() if kind["parameterType"] == "NUMBER_INTEGER"
    }
    return inputs | {name: int(inputs[name]) for name in integers & inputs.keys()}


def named_after(source: str) -> str:
    """Return a model name made from the last folder of a source."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])
    return last.strip("._-")[:63] or "photographs"


def _with_file_contents(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the text of code files, and the absolute path of weights."""
    training = arguments.get("training", {})
    code: dict[str, Any] = {n: arguments[n] for n in ("model", "script") if n in arguments}
    packed = model_file.with_code({**code, **training})
    if "script" in code:
        arguments = {**arguments, "script": packed.pop("script")}
    more: dict[str, Any] = {n: packed[n] for n in ("model_code", "script") if n in packed}
    arguments = {**arguments, "training": {**training, **more}} if more else arguments
    for place in (arguments, arguments.get("training", {})):
        pretrained = str(place.get("pretrained", ""))
        if is_path(pretrained) and Path(pretrained).exists():
            place["pretrained"] = str(Path(pretrained).resolve())
    return arguments


def _read_file(file: Path) -> list[tuple[str, Any]]:
    advice = "write lines such as epochs: 10"
    text = text_of(file, advice)
    try:
        content = yaml_of(text)
    except InputError as error:
        raise InputError(f"{file} {error}; {advice}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} has no settings; {advice}")
    return [(str(name), value) for name, value in content.items()]


def _parse_yaml(text: str) -> Any:
    try:
        return yaml_of(text)
    except InputError:
        return text


def _typed(name: str, value: Any, spec: Mapping[str, Any]) -> Any:
    """Return the value in KFP's type, which KFP's server does not check."""
    kind, description = KINDS[spec["parameterType"]]
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML reads 1e-2 as text
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = spec.get("description", "").rstrip(".")
        why = f"it should be {description}" + (f" ({what})" if what else "")
        raise InputError(f"{name}={value!r} cannot be used: {why}")
    literals = spec.get("literals", [])
    if literals and value not in literals:
        known = [str(one) for one in literals]
        near = hint(str(value), known)
        raise InputError(f"{name}={value!r} is unknown: it is one of {', '.join(known)}{near}")
    return value
