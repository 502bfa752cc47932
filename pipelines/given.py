"""Settings as a person gives them: `key=value` on the command line, and a file of them."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml

import kfp_ddp
from kfp_ddp.checks.preflight.parameters import MODELS, SUBJECTS
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings, hint
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.supervision import JOB_OWN
from kfp_ddp.pipelines.document import Document
from kfp_ddp.pipelines.document import read as read_document
from kfp_ddp.training import model_file

COMPILED = Path(kfp_ddp.__file__).parent / "compiled"
KINDS: dict[str, tuple[type, str]] = {
    "STRING": (str, "text"),
    "NUMBER_INTEGER": (int, "a whole number"),
    "NUMBER_DOUBLE": (float, "a number"),
    "BOOLEAN": (bool, "true or false"),
    "LIST": (list, "a list such as [a, b]"),
    "STRUCT": (dict, "a mapping such as {a: 1}"),
}
"""What a parameter takes by KFP's name of its type, and that in words."""


class Key(NamedTuple):
    """A parameter of the pipeline, and the setting in it where it is a mapping."""

    parameter: str
    setting: str = ""


class Form:
    """The parameters of a pipeline, and the models that stand behind those that are ours."""

    def __init__(self, pipeline: Document) -> None:
        self.pipeline = pipeline
        self.parameters = pipeline.parameters
        # What our components take under these names, they check by these models.
        ours = any("from kfp_ddp." in each for each in pipeline.programs().values())
        self.subjects = {
            name: models for name, models in SUBJECTS.items() if ours and self._is(name, "STRUCT")
        }
        self._models = MODELS if ours else ()

    def read(self, file: Path | None, words: Iterable[str]) -> dict[str, Any]:
        """Arguments of the pipeline: of a YAML file, and over them those of `key=value` words.

        A key is a parameter of the pipeline, or a setting of one of its mappings: epochs, or
        training.cache_gb, or cache_gb where only one mapping has it.

        Raises:
            InputError: a key that is unknown or ambiguous, a value that its setting does not take,
                or a file that cannot be read.
        """
        given = _of_file(file) if file else []
        arguments = self.check([*given, *(self._of_word(word) for word in words)])
        return _with_files(arguments) if "training" in self.subjects else arguments

    def check(self, given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Arguments by name, each as its parameter takes it; of one given twice, the last.

        Raises:
            InputError: one that is unknown or ambiguous, or that its parameter does not take.
        """
        arguments: dict[str, Any] = {}
        for name, value in given:
            if name in self.subjects and isinstance(value, dict):
                for inner, each in value.items():
                    self._put(arguments, self._key(f"{name}.{inner}"), each)
            else:
                self._put(arguments, self._key(name), value)
        return arguments

    def completed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """With the defaults of mappings of which only some settings are given.

        Raises:
            InputError: a parameter is missing that has no default.
        """
        for name, spec in self.parameters.items():
            if name not in arguments and "defaultValue" not in spec and not spec.get("isOptional"):
                what = spec.get("description", "").rstrip(".") or f"give --set {name}=…"
                raise InputError(f"{name} is missing: {what}")
        return {
            name: {**self.parameters[name].get("defaultValue", {}), **value}
            if name in self.subjects
            else value
            for name, value in arguments.items()
        }

    def _is(self, name: str, kind: str) -> bool:
        return bool(self.parameters.get(name, {}).get("parameterType") == kind)

    def _of_word(self, word: str) -> tuple[str, Any]:
        """Name and value of `key=value`: text stays text where that is asked for, else is YAML."""
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"--set {word!r} is no setting; write key=value, such as epochs=10")
        key = self._key(name)
        model, field = self._model(key)
        if model is None:
            return name, text if self._is(key.parameter, "STRING") else _of_yaml(text)
        annotation = model.model_fields[field].annotation
        if annotation is str or model.choices(field) or not text:
            return name, text
        value = _of_yaml(text)
        listed = get_origin(annotation) is tuple and isinstance(value, str)
        return name, [value] if listed else value

    def _put(self, arguments: dict[str, Any], key: Key, value: Any) -> None:
        """Set it, if its model or its type takes the value."""
        model, name = self._model(key)
        if model is not None and not (key.setting == "" and self._is_default(name, value)):
            value = model.checked(name, value)
        if key.setting:
            arguments.setdefault(key.parameter, {})[key.setting] = value
        else:
            arguments[key.parameter] = _typed(name, value, self.parameters[name])

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether a box is left as it is: one of 0 may stand for the recipe's choice."""
        spec = self.parameters[name]
        same = "defaultValue" in spec and spec["defaultValue"] == value
        return same and not isinstance(value, bool | dict)

    def _key(self, name: str) -> Key:
        """Where a setting belongs.

        Raises:
            InputError: nowhere, or in several places.
        """
        subject, dot, inner = name.partition(".")
        if dot and subject not in self.subjects:
            raise InputError(f"{name}: there is no {subject!r}{hint(subject, [*self.subjects])}")
        offered = {
            one: [
                field for model in models for field in model.model_fields if field not in model.own
            ]
            for one, models in self.subjects.items()
            if not dot or one == subject
        }
        wanted = inner if dot else name
        if wanted in self.parameters and (not dot or wanted in offered[subject]):
            return Key(wanted)
        places = [one for one, fields in offered.items() if wanted in fields]
        if not places:
            known = sorted({*self.parameters, *(one for each in offered.values() for one in each)})
            near = hint(wanted, known) or ("" if self.subjects else f"; it has {', '.join(known)}")
            raise InputError(f"there is no setting {name!r}{near}")
        if len(places) > 1 and wanted in JOB_OWN:
            places.remove("job")
        if len(places) > 1:
            several = " or ".join(f"{one}.{wanted}" for one in places)
            raise InputError(f"{name} is a setting of several things: write {several}")
        return Key(places[0], wanted)

    def _model(self, key: Key) -> tuple[type[Settings] | None, str]:
        """The model that has the setting, if one of ours has, and its name there."""
        models = self.subjects[key.parameter] if key.setting else self._models
        name = key.setting or key.parameter
        return next((model for model in models if name in model.model_fields), None), name


@cache
def form_of(name: str) -> Form:
    """The form of a compiled pipeline of ours, such as train_resnet."""
    return Form(read_document(COMPILED / f"{name}.yaml"))


def named_after(source: str) -> str:
    """A model's name, after the last folder of its source."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rstrip("/").rpartition("/")[2])
    return last.strip("._-")[:63] or "photographs"


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline with others over them, setting by setting."""
    both = {**under, **over}
    for name in form_of("train_resnet").subjects:
        both[name] = {**under.get(name, {}), **over.get(name, {})}
    return both


def _with_files(arguments: dict[str, Any]) -> dict[str, Any]:
    """With the texts of files of code, and the whole path of weights to begin with."""
    training = arguments.get("training", {})
    boxes: dict[str, Any] = {
        name: arguments[name] for name in ("model", "script") if name in arguments
    }
    found = model_file.with_code({**boxes, **training})
    if "script" in boxes:
        arguments = {**arguments, "script": found.pop("script")}
    more: dict[str, Any] = {n: found[n] for n in ("model_code", "script") if n in found}
    if training.get("init_from") and Path(training["init_from"]).exists():
        more["init_from"] = str(Path(training["init_from"]).resolve())
    return {**arguments, "training": {**training, **more}} if more else arguments


def _of_file(file: Path) -> list[tuple[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check its path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} is not YAML: {one_line(error)}; write lines such as epochs: 10"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no settings; write lines such as epochs: 10")
    return [(str(name), value) for name, value in content.items()]


def _of_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _typed(name: str, value: Any, spec: Mapping[str, Any]) -> Any:
    """The value as KFP's type has it, which its server takes for less than it is: 1.5 for an int.

    Raises:
        InputError: it is of another type, or none of the choices.
    """
    kind, words = KINDS[spec["parameterType"]]
    if kind is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML takes 1e-2 for text
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = spec.get("description", "").rstrip(".")
        why = f"it should be {words}" + (f" ({what})" if what else "")
        raise InputError(f"{name}={value!r} cannot be used: {why}")
    literals = spec.get("literals", [])
    if literals and value not in literals:
        known = [str(one) for one in literals]
        near = hint(str(value), known)
        raise InputError(f"{name}={value!r} is unknown: it is one of {', '.join(known)}{near}")
    return value
