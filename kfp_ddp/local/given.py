"""Settings as a person gives them: `key=value` on the command line, and a file of them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.settings import Settings, hint
from kfp_ddp.components.preflight.parameters import MODELS, SUBJECTS
from kfp_ddp.local.pipeline import COMPILED
from kfp_ddp.training import model_file

Key = tuple[str, str]
"""A parameter of the pipeline, and the setting in it where it is a mapping, else ''."""


@cache
def form() -> tuple[str, ...]:
    """The parameters of the pipeline that runs."""
    with COMPILED.open() as file:
        spec = next(yaml.load_all(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    return tuple(spec["root"]["inputDefinitions"]["parameters"])


def read(file: Path | None, words: Iterable[str]) -> dict[str, Any]:
    """Arguments of the pipeline: those of a YAML file, and over them those of `key=value` words.

    A key is a parameter of the pipeline, or a setting of one of its mappings: epochs, or
    training.cache_gb, or cache_gb where only one mapping has it.

    Raises:
        InputError: a key that is unknown or ambiguous, a value that its setting does not take, or
            a file that cannot be read.
    """
    arguments: dict[str, Any] = {}
    given = _of_file(file) if file else []
    given += [_of_word(word) for word in words]
    for name, value in given:
        if name in SUBJECTS and isinstance(value, dict):
            for inner, each in value.items():
                _put(arguments, _key(f"{name}.{inner}"), each)
        else:
            _put(arguments, _key(name), value)
    return _with_files(arguments)


def _with_files(arguments: dict[str, Any]) -> dict[str, Any]:
    """With the text of a model's file, and the whole path of weights to begin with."""
    training = arguments.get("training", {})
    found = model_file.with_code({"model": arguments.get("model", ""), **training})
    more = {"model_code": found["model_code"]} if "model_code" in found else {}
    if training.get("init_from") and Path(training["init_from"]).exists():
        more["init_from"] = str(Path(training["init_from"]).resolve())
    return {**arguments, "training": {**training, **more}} if more else arguments


def _of_file(file: Path) -> list[tuple[str, Any]]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; check its path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{file} is not YAML: {why}; write lines such as epochs: 10") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no settings; write lines such as epochs: 10")
    return [(str(name), value) for name, value in content.items()]


def _of_word(word: str) -> tuple[str, Any]:
    """Name and value of `key=value`: text stays text where that is asked for, else it is YAML."""
    name, equals, text = word.partition("=")
    if not equals:
        raise InputError(f"--set {word!r} is no setting; write key=value, such as epochs=10")
    model, field = _model(_key(name))
    annotation = model.model_fields[field].annotation
    if annotation is str or model.choices(field) or not text:
        return name, text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    return name, [value] if get_origin(annotation) is tuple and isinstance(value, str) else value


def _put(arguments: dict[str, Any], key: Key, value: Any) -> None:
    """Set it, if the model behind it takes the value."""
    (parameter, setting), (model, name) = key, _model(key)
    checked = model.checked(name, value)
    if setting:
        arguments.setdefault(parameter, {})[setting] = checked
    else:
        arguments[parameter] = checked


def _key(name: str) -> Key:
    """Where a setting belongs.

    Raises:
        InputError: nowhere, or in several places.
    """
    subject, dot, inner = name.partition(".")
    if dot and subject not in SUBJECTS:
        raise InputError(f"{name}: there is no {subject!r}{hint(subject, list(SUBJECTS))}")
    offered = {
        one: [field for model in models for field in model.model_fields if field not in model.own]
        for one, models in SUBJECTS.items()
        if not dot or one == subject
    }
    wanted = inner if dot else name
    if wanted in form() and (not dot or wanted in offered[subject]):
        return wanted, ""
    places = [one for one, fields in offered.items() if wanted in fields]
    if not places:
        known = sorted({*form(), *(field for fields in offered.values() for field in fields)})
        raise InputError(f"there is no setting {name!r}{hint(wanted, known)}")
    if len(places) > 1:
        several = " or ".join(f"{one}.{wanted}" for one in places)
        raise InputError(f"{name} is a setting of several things: write {several}")
    return places[0], wanted


def _model(key: Key) -> tuple[type[Settings], str]:
    """The model that has the setting, and its name there."""
    parameter, setting = key
    models = SUBJECTS[parameter] if setting else MODELS
    name = setting or parameter
    return next(model for model in models if name in model.model_fields), name


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline with others over them, setting by setting."""
    both = {**under, **over}
    for name in SUBJECTS:
        both[name] = {**under.get(name, {}), **over.get(name, {})}
    return both
