"""Options of a sync that come as a mapping, laid over a step's own inputs."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kfp_ddp.base.errors import InputError
from kfp_ddp.components.data_sync.options import Options

_NOT_OFFERED = {"dataset", "timeout", "mirror", "retry"}
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(Options) if field.name not in _NOT_OFFERED
}
"""What the component `data_sync` offers by name, with its default; globs are a tuple."""
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a text of globs, comma-separated",
}


def options_of(dataset: str, inputs: Mapping[str, object], more: Mapping[str, object]) -> Options:
    """The step's inputs, overlaid with what `more` names, checked.

    Raises:
        InputError: one line that names the first setting that is unknown or cannot be used.
    """
    for name in more:
        if name not in DEFAULTS:
            raise InputError(
                f"the sync has no setting {name!r}; it has {', '.join(sorted(DEFAULTS))}"
            )
    given = {name: _typed(name, value) for name, value in {**inputs, **more}.items()}
    options = Options(dataset=dataset, **given)
    options.check()
    return options


def _typed(name: str, value: object) -> Any:
    """The value as the setting's type; KFP sends every number in a mapping as a float."""
    kind = type(DEFAULTS[name])
    if kind is tuple and isinstance(value, str):
        return globs(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = float(value).is_integer()
        if kind is float or (kind is int and whole):
            return kind(value)
    raise InputError(f"{name} of the sync is {value!r}; give {_WORDS[kind]}")


def globs(text: str) -> tuple[str, ...]:
    """Patterns from a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
