"""Typed settings with errors of one line, and typed records of files."""

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import from_json

ALIASES = {
    "arch": "model",
    "batch": "batch_size",
    "batchsize": "batch_size",
    "gpu": "gpus_per_node",
    "gpus": "gpus_per_node",
    "lr": "learning_rate",
    "network": "model",
    "size": "image_size",
    "weights": "pretrained",
    "wd": "weight_decay",
}
"""Names of settings in other programs."""


class Settings(BaseModel):
    """Frozen settings, described by the docstring of each field; no unknown names, no NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    patterns: ClassVar[dict[str, str]] = {}
    """Descriptions of the fields' patterns, for messages."""
    old_names: ClassVar[Mapping[str, str]] = {}
    """Fields by their old names, which are still read."""
    set_by_step: ClassVar[frozenset[str]] = frozenset()
    """Fields that only the step sets."""
    secret: ClassVar[frozenset[str]] = frozenset()
    """Fields whose values errors do not show."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, fields: Any) -> Any:
        return rename(fields, cls) if cls.old_names and isinstance(fields, dict) else fields

    @classmethod
    def create(cls, **fields: Any) -> Self:
        """Validate `fields`; raise InputError, one line about the first invalid field."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InputError(cls._one_line(error.errors(include_url=False)[0])) from None
        except OverflowError as error:  # pydantic takes integers that fit no float
            raise InputError(f"a number is too large: {error}") from None

    @classmethod
    def offered(cls) -> list[str]:
        """Return the names of the fields that a user may set."""
        return [name for name in cls.model_fields if name not in cls.set_by_step]

    def explicit(self) -> dict[str, Any]:
        """Return the fields that were set, as JSON values; defaults are left out."""
        return self.model_dump(mode="json", exclude_unset=True)

    @classmethod
    def checked(cls, name: str, value: object) -> Any:
        """Return the validated value of one field, as JSON; raise InputError."""
        field = cls.model_fields[name]
        annotated: Any = Annotated[field.annotation, field]
        adapter: TypeAdapter[Any] = TypeAdapter(annotated)
        try:
            return adapter.dump_python(adapter.validate_python(value), mode="json")
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            problem["loc"] = (name, *problem["loc"])
            raise InputError(cls._one_line(problem)) from None

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...]:
        """Return the allowed texts of a field; empty if it is not a closed choice."""
        annotation = cls.model_fields[name].annotation
        closed = typing.get_origin(annotation) is typing.Literal
        return typing.get_args(annotation) if closed else ()

    @classmethod
    def _one_line(cls, problem: ErrorDetails) -> str:
        path = [str(part) for part in problem["loc"]]
        name = path[0] if path else ""
        value = problem["input"]
        if problem["type"] == "extra_forbidden":
            return f"there is no setting {name!r}{hint(name, list(cls.model_fields))}"
        if problem["type"] == "missing":
            return f"{name} is missing: {cls._description(name)}"
        # Of a list, an item is unknown, and not the setting.
        if problem["type"] == "literal_error" and len(path) == 1:
            known = typing.get_args(cls.model_fields[name].annotation)
            names = ", ".join(str(option) or "''" for option in known)
            return f"{name}={value!r} is unknown: it is one of {names}{hint(str(value), known)}"
        message = problem["msg"].removeprefix("Value error, ")
        if not name:
            return message
        reason = cls._reason(problem, name, message)
        is_hidden = name in cls.secret or "@" in str(value)  # perhaps a password in an address
        shown = "" if is_hidden else f"={value!r}"
        return f"{'.'.join(path)}{shown} cannot be used: {reason} ({cls._description(name)})"

    @classmethod
    def _description(cls, name: str) -> str:
        field = cls.model_fields.get(name)
        text = field.description if field else ""
        return (text or "").rstrip(".")

    @classmethod
    def _reason(cls, problem: ErrorDetails, name: str, message: str) -> str:
        """Return why a value is invalid, in the words of a user instead of pydantic's."""
        pattern = problem.get("ctx", {}).get("pattern")
        if words := cls.patterns.get(str(pattern)):
            return f"it should be {words}"
        if problem["type"] != "tuple_type":
            return re.sub(r"^(Input|String|Value) ", "it ", message).partition(", unable to")[0]
        value = problem["input"]
        if isinstance(value, str) and name not in cls.secret:
            return f"it should be a list such as {value.split()}"
        return "it should be a list"


class SettingsPart(Settings):
    """A part of the settings of a training run; it checks the rules among its own fields."""

    def is_set(self, name: str) -> bool:
        """Return whether the field was set; a default may be replaced by a better one."""
        return name in self.model_fields_set

    def _fill(self, **values: Any) -> None:
        """Change fields of this frozen model while it is validated; they do not count as set."""
        # An attribute is frozen, and model_copy marks a field as set: to_argv would repeat it.
        self.__dict__.update(values)


def check_reserved(subject: str, settings: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise InputError, with its reason, if settings, named `subject`, have a reserved name."""
    for name in settings:
        if name in reserved:
            raise InputError(f"{subject} sets {name}, which {reserved[name]}")


def rename(settings: Mapping[str, Any], *models: type[Settings]) -> dict[str, Any]:
    """Return settings with those that have an old name under that of their field."""
    old_names = {old: new for model in models for old, new in model.old_names.items()}
    return {old_names.get(name, name): value for name, value in settings.items()}


def split(
    subject: str,
    settings: Mapping[str, Any],
    *models: type[Settings],
    reserved: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Split the settings in `subject`, such as job, into the fields of each model that shares it.

    `reserved` has further names that cannot be set, each with the reason. Raises InputError.
    """
    names_of = [model.offered() for model in models]
    known = [name for names in names_of for name in names]
    internal = set[str]().union(*(model.set_by_step for model in models)) - set(known)
    settings = rename(settings, *models)
    check_reserved(
        subject, settings, {**dict.fromkeys(internal, "the step sets itself"), **reserved}
    )
    for name in settings:
        if name not in known:
            raise InputError(f"{subject} has no setting {name!r}{hint(name, known)}")
    return [_chosen(settings, names) for names in names_of]


def _chosen(settings: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def hint(name: str, known: typing.Sequence[str]) -> str:
    """Return a suggestion for an unknown name, to end a message; '' if none is close."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


_LONGEST = 64
"""Characters of a name that is compared with others: more take long, and are no typing error."""


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return the closest known name: an alias's, within two edits, or begun by `name`; or ''."""
    options = list(known)
    if ALIASES.get(name) in options:
        return ALIASES[name]
    if not 3 <= len(name) <= _LONGEST:
        return ""
    # Of several that are as close, the longer name: nodes for node, not code.
    ranked = ((_edits(name, option), not option.startswith(name), option) for option in options)
    edits, _, closest = min(ranked, default=(9, True, ""))
    if edits <= min(2, len(name) // 3):
        return closest
    return next((option for option in options if option.startswith(name)), "")


def _edits(one: str, other: str) -> int:
    """Return how many letters to insert, delete, replace or swap with their neighbour."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        rows.append([i])
        for j, b in enumerate(other, 1):
            edits = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (a != b))
            is_swapped = (a, b) == (other[j - 2], one[i - 2])
            if min(i, j) > 1 and is_swapped:
                edits = min(edits, rows[i - 2][j - 2] + 1)
            rows[i].append(edits)
    return rows[-1][-1]


class Stored(BaseModel):
    """Base of records in files; unknown fields, as of a later version, are ignored, NaN is not."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def first_fault(error: ValidationError) -> str:
    """Return the first field that is missing or invalid, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"


def mapping_in(content: bytes | str | None) -> dict[str, Any]:
    """Return the JSON object in a text; {} if it is none, for example truncated."""
    try:
        document = from_json(content or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def mapping_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file has none or is missing."""
    try:
        return mapping_in(path.read_bytes())
    except OSError:
        return {}
