"""Typed settings whose errors are one line, in the words of somebody who sets them."""

import difflib
import re
import typing
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from kfp_ddp.base.errors import InputError


class Settings(BaseModel):
    """A frozen set of named values; unknown names and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    patterns: ClassVar[dict[str, str]] = {}
    """What the patterns of fields ask for, in words."""

    @classmethod
    def create(cls, **fields: Any) -> Self:
        """Validate `fields`.

        Raises:
            InputError: one line that names the first field at fault.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InputError(cls._one_line(error.errors(include_url=False)[0])) from None

    @classmethod
    def _one_line(cls, problem: ErrorDetails) -> str:
        path, value = [str(part) for part in problem["loc"]], problem["input"]
        name = path[0] if path else ""
        if problem["type"] == "extra_forbidden":
            return f"there is no setting {name!r}{_hint(name, list(cls.model_fields))}"
        what = cls.model_fields[name].description if name in cls.model_fields else ""
        if problem["type"] == "missing":
            return f"{name} is missing: {what}"
        if problem["type"] == "literal_error" and len(path) == 1:
            known = typing.get_args(cls.model_fields[name].annotation)
            names = ", ".join(str(one) or "''" for one in known)
            return f"{name}={value!r} is unknown: it is one of {names}{_hint(str(value), known)}"
        message = problem["msg"].removeprefix("Value error, ")
        if not name:
            return message
        reason = re.sub(r"^(Input|String|Value) ", "it ", message)
        if words := cls.patterns.get(str(problem.get("ctx", {}).get("pattern"))):
            reason = f"it should be {words}"
        return f"{'.'.join(path)}={value!r} cannot be used: {reason} ({what})"


def _hint(name: str, known: typing.Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
