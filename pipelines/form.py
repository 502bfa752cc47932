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
from kfp_ddp.core.folders import place_of
from kfp_ddp.core.settings import Settings, hint, rename
from kfp_ddp.core.text import yaml_of
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL
from kfp_ddp.models.weights_download import is_path
from kfp_ddp.pipelines.document import Document, defaults_of, text_of
from kfp_ddp.pipelines.document import read as read_document
from kfp_ddp.plan.form import LAST, MODELS, SUBJECTS
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


_WRITTEN: dict[type, tuple[type, ...]] = {float: (int, str), int: (str,)}
"""Types of values that may be written for a number."""
_NO_PATH = "(?!)"
FILES = {
    "exclude": r"(?<=^@).+",
    "model": r"^.+\.py(?=:|$)",
    "pretrained": r"^(?!(auto|true|false)$).+",
    "script": r"^.+\.py$",
}
"""Settings with a file of this machine that is read for each run: where in the value it is."""
PLACES = {
    **dict.fromkeys(("source", "destination", "checkpoint", "bundle", "table", "work"), "^.+"),
    "champion": f"^(?!{LAST}$).+",
    **dict.fromkeys(("labels", "tags"), "^[~/].*"),
}
"""Likewise settings that a run on a cluster opens there; other labels and tags are in the data."""
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
        self.subjects: dict[str, tuple[type[Settings], ...]] = {}
        self._models: tuple[type[Settings], ...] = ()
        self._files: Mapping[str, str] = {}
        self._places: Mapping[str, str] = {}
        # Parameters of other pipelines may have the same names.
        ours = any("kfp_ddp." in program for program in pipeline.programs().values())
        if ours:
            mappings = [name for name in SUBJECTS if self._is(name, "STRUCT")]
            self.subjects = {name: SUBJECTS[name] for name in mappings}
            self._models = MODELS
            self._files = FILES
            self._places = PLACES

    def read(
        self,
        file: Path | None,
        words: Iterable[Word],
        old: Mapping[str, Any] | None = None,
        local: bool = False,
    ) -> dict[str, Any]:
        """Return arguments of a YAML file, overridden by words; raise InputError.

        A path in the file is relative to it; those of a run on a cluster, which is not `local`, are
        left as they are, if nothing of this machine is read there.

        A key is a parameter of the pipeline, or a setting of one of its mappings: epochs, or
        training.cache_gb, or cache_gb if only one mapping has it. Such a setting is added to the
        mapping of the arguments `old`, or to the default. A mapping replaces it, as in KFP's API.
        """
        paths = {**self._files, **self._places} if local else self._files
        settings = []
        if file:
            base = str(file.parent.absolute())
            for name, value in _read_file(file, json_numbers=not self.subjects):
                settings.append((name, _located(value, name, paths, base)))
        for word in words:
            name, value = self._parse_word(word) if isinstance(word, str) else word
            settings.append((name, _located(value, name, paths, "")))
        arguments = self.check(settings)
        if "training" in self.subjects:
            arguments = _with_file_contents(arguments)
        replaced = {name for name, value in settings if isinstance(value, dict)}
        for name in self.subjects.keys() & arguments.keys() - replaced:
            default = self.parameters[name].get("defaultValue", {})
            others = old.get(name, default) if old else default
            arguments[name] = {**others, **arguments[name]}
        return arguments

    def check(self, settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return validated arguments by name, the last value of each; raise InputError."""
        arguments: dict[str, Any] = {}
        for name, value in settings:
            if name in self.subjects and isinstance(value, dict):
                arguments.setdefault(name, {})
                for inner, inner_value in value.items():
                    self._set(arguments, self._resolve(f"{name}.{inner}"), inner_value)
            else:
                self._set(arguments, self._resolve(name), value)
        return arguments

    def check_places(self, arguments: Mapping[str, Any]) -> None:
        """Raise InputError for a path of this machine, which a cluster has not."""
        given = {**arguments.get("training", {}), **arguments.get("gate", {}), **arguments}
        for name, path in self._places.items():
            text = "".join(re.findall(path, str(given.get(name, ""))))
            if place_of(text.removeprefix("file://")):
                raise InputError(
                    f"{name}={text!r} is a path of this machine, which a cluster cannot read: "
                    "give the address of a bucket, or run here with --local"
                )

    def check_complete(self, arguments: Mapping[str, Any]) -> None:
        """Raise InputError for a missing argument."""
        for name, spec in self.parameters.items():
            required = "defaultValue" not in spec and not spec.get("isOptional")
            if required and name not in arguments:
                # The first part of its description.
                what = re.split(r"[.;:](?= |$)", spec.get("description", ""))[0]
                meaning = f" ({what})" if what else ""
                raise InputError(f"{name} is missing: give --set {name}=…{meaning}")

    def _is(self, name: str, kind: str) -> bool:
        return bool(self.parameters.get(name, {}).get("parameterType") == kind)

    def _parse_word(self, word: str) -> tuple[str, Any]:
        """Return name and value of `key=value`; the value is YAML, unless the setting is text."""
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"--set {word!r} is not a setting; write key=value, such as epochs=10")
        key = self._resolve(name)
        return name, self._parse_value(key, text)

    def _parse_value(self, key: FormField, text: str) -> Any:
        """Return the value of a setting: the text itself where it is text, otherwise YAML."""
        model, field = self._validator(key)
        if model is None:
            if self._is(key.parameter, "STRING"):
                return text
            return _parse_yaml(text, json_numbers=True)
        annotation = model.model_fields[field].annotation
        is_text = annotation is str or bool(model.choices(field))
        if is_text or not text:
            return text
        value = _parse_yaml(text)
        if isinstance(value, str) and get_origin(annotation) is tuple:
            return [value]  # a list of one word
        return value

    def _set(self, arguments: dict[str, Any], key: FormField, value: Any) -> None:
        model, name = self._validator(key)
        is_default = key.setting == "" and self._is_default(name, value)
        if model is not None and not is_default:
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
        """Return the place of a setting, such as epochs or training.cache_gb; raise InputError."""
        subject, dot, inner = name.partition(".")
        if dot and subject not in self.subjects:
            raise InputError(f"{name}: there is no {subject!r}{hint(subject, [*self.subjects])}")
        if dot:
            offered = self._offered([subject])
            setting = self._newest_name(inner)
        else:
            offered = self._offered(self.subjects)
            setting = self._newest_name(name)
        # A box of the form, which may also be written as a setting of its mapping.
        if setting in self.parameters and (not dot or setting in offered[subject]):
            return FormField(setting)
        mappings = [mapping for mapping, fields in offered.items() if setting in fields]
        if not mappings:
            raise self._unknown(name, setting, offered)
        # A table of labels is meant more often than labels of pods, which are job.labels.
        rarely_of_job = setting in JOB_INTERNAL or setting == "labels"
        if len(mappings) > 1 and rarely_of_job:
            mappings.remove("job")
        if len(mappings) > 1:
            full_names = [f"{mapping}.{setting}" for mapping in mappings]
            several = " or ".join(full_names)
            raise InputError(f"{name} is a setting of several things: write {several}")
        return FormField(mappings[0], setting)

    def _offered(self, subjects: Iterable[str]) -> dict[str, list[str]]:
        """Return the settings of each mapping that a user may set."""
        offered = {}
        for subject in subjects:
            names = [model.offered() for model in self.subjects[subject]]
            offered[subject] = [*itertools.chain(*names)]
        return offered

    def _newest_name(self, setting: str) -> str:
        """Return today's name of a setting, which may have its name of an earlier version."""
        if setting in self.parameters:
            return setting
        models = itertools.chain(*self.subjects.values())
        (newest,) = rename({setting: None}, *models)
        return newest

    def _unknown(self, name: str, setting: str, offered: Mapping[str, list[str]]) -> InputError:
        """Return the error for an unknown setting, with a near one, or all of a small form."""
        known = sorted({*self.parameters, *itertools.chain(*offered.values())})
        near = hint(setting, known)
        if not near and not self.subjects:
            near = f"; it has {', '.join(known)}"
        return InputError(f"there is no setting {name!r}{near}")

    def _validator(self, key: FormField) -> tuple[type[Settings] | None, str]:
        """Return the model that validates a setting, if any, and its name there."""
        if key.setting:
            name = key.setting
            models = self.subjects[key.parameter]
        else:
            name = key.parameter
            models = self._models
        model = next((model for model in models if name in model.model_fields), None)
        return model, name


@cache
def form_of(name: str) -> Form:
    """Return the form of our pipeline with this name, such as train_resnet."""
    return Form(read_document(COMPILED / f"{name}.yaml"))


def check_arguments(pipeline: Document, arguments: Mapping[str, Any]) -> Run | None:
    """Check arguments as `preflight` does; raise its InputError. None for a pipeline without it."""
    given = {**defaults_of(pipeline.spec["root"]), **arguments}
    task = pipeline.spec["root"]["dag"].get("tasks", {}).get("preflight")
    if task is None:
        if "prediction" in Form(pipeline).subjects:
            _check_prediction(given)
        return None
    component = pipeline.spec.get("components", {}).get(task["componentRef"]["name"], {})
    program = pipeline.programs().get(component.get("executorLabel"), "")
    # A step of somebody else may have this name.
    if "kfp_ddp." not in program or not program.endswith("preflight"):
        return None
    return parse(_inputs(task, component, given))


def _check_prediction(given: Mapping[str, Any]) -> None:
    """Check the arguments of batch_predict, which has no preflight; raise InputError."""
    from kfp_ddp.evaluation.engine import job_fields  # few forms need it

    names = ("source", "bundle", "table", "prediction")
    PredictionRequest.from_inputs(*(given[name] for name in names))
    job_fields(given["job"], "image", given["backend"])


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
    # Protobuf has one type of numbers: 2.0 comes for 2.
    for name, kind in declared.items():
        if name in inputs and kind["parameterType"] == "NUMBER_INTEGER":
            inputs[name] = int(inputs[name])
    return inputs


def named_after(source: str) -> str:
    """Return a model name made from the last folder of a source."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])
    return last.strip("._-")[:63] or "photographs"


def _with_file_contents(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the text of code files, and the absolute path of weights."""
    training = arguments.get("training", {})
    boxes = _some(arguments, "model", "script")
    packed = model_file.with_code({**boxes, **training})
    if "script" in boxes:
        arguments = {**arguments, "script": packed.pop("script")}
    code = _some(packed, "model_code", "script")
    if code:
        arguments = {**arguments, "training": {**training, **code}}
    for place in (arguments, arguments.get("training", {})):
        for name in ("pretrained", "checkpoint"):
            path = str(place.get(name, ""))
            if is_path(path) and Path(path).exists():
                place[name] = str(Path(path).resolve())
    names = arguments.get("gate", {}).get("classes", ())
    if len(names) == 1 and Path(names[0]).is_file():
        arguments["gate"]["classes"] = _names_in(Path(names[0]))
    return arguments


def _located(value: Any, name: str, paths: Mapping[str, str], base: str) -> Any:
    """Return the value of a setting, with its paths of this machine as `place_of` finds them."""
    if isinstance(value, dict):
        return {inner: _located(one, inner, paths, base) for inner, one in value.items()}
    if isinstance(value, list):
        return [_located(one, name, paths, base) for one in value]
    if not isinstance(value, str):
        return value
    path = paths.get(name.rpartition(".")[2], _NO_PATH)
    return re.sub(path, lambda found: place_of(found[0], base) or found[0], value)


def _names_in(file: Path) -> list[str]:
    """Return the names of a file: a list in JSON or YAML, or one in each line."""
    text = text_of(file, "write a name a line")
    names = _parse_yaml(text)
    if not isinstance(names, list):
        names = filter(None, map(str.strip, text.splitlines()))
    return [str(name) for name in names]


def _some(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _read_file(file: Path, json_numbers: bool) -> list[tuple[str, Any]]:
    advice = "write lines such as epochs: 10"
    text = text_of(file, advice)
    try:
        content = yaml_of(text, json_numbers=json_numbers)
    except InputError as error:
        raise InputError(f"{file} {error}; {advice}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} has no settings; {advice}")
    return [(str(name), value) for name, value in content.items()]


def _parse_yaml(text: str, json_numbers: bool = False) -> Any:
    try:
        return yaml_of(text, json_numbers=json_numbers)
    except InputError:
        return text


def _typed(name: str, value: Any, spec: Mapping[str, Any]) -> Any:
    """Return the value in KFP's type, which KFP's server does not check."""
    kind, description = KINDS[spec["parameterType"]]
    value = _converted(value, kind)
    fits = isinstance(value, kind)
    if isinstance(value, bool) and kind is not bool:
        fits = False  # a bool is an int to Python
    if not fits:
        why = f"it should be {description}"
        meaning = spec.get("description", "").rstrip(".")
        if meaning:
            why += f" ({meaning})"
        raise InputError(f"{name}={value!r} cannot be used: {why}")
    literals = spec.get("literals", [])
    if literals and value not in literals:
        known = [str(literal) for literal in literals]
        near = hint(str(value), known)
        raise InputError(f"{name}={value!r} is unknown: it is one of {', '.join(known)}{near}")
    return value


def _converted(value: Any, kind: type) -> Any:
    """Return a number in the type of its parameter, if it is written in another one."""
    if isinstance(value, bool):
        return value
    if isinstance(value, _WRITTEN.get(kind, ())):
        with contextlib.suppress(ValueError):
            value = float(str(value))  # YAML reads 1e-2 as text
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
