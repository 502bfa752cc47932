"""Make texts safe for messages, Markdown, terminals and containers; read JSON and YAML."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from datetime import date
from functools import cache
from operator import itemgetter
from typing import Any

from kfp_ddp.core.errors import InputError


def one_line(value: object, limit: int = 240) -> str:
    """Return a text, or an error's message or type, in one line of at most `limit` characters."""
    line = " ".join(str(value).split())
    if not line and isinstance(value, BaseException):
        line = type(value).__name__
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def from_json(text: str | bytes | bytearray) -> Any:
    """Return the content of a JSON text; raise ValueError, also for a key twice or deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of pairs; raise ValueError for two values of one key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        ((key, _),) = Counter(map(itemgetter(0), pairs)).most_common(1)
        raise ValueError(f"the key {key!r} stands twice")
    return mapping


_DEEPEST = 100
"""Limit of nested lists and mappings in YAML."""
LARGEST_YAML = 2 << 20
"""Characters of a YAML text, and of what it stands for: aliases repeat parts of it."""
_LONGEST_NUMBER = 64
"""Characters of a number: one of thousands fits no float, and Python writes no such integer."""
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,2}\Z")
"""A number of JSON with an exponent."""


def yaml_of(text: str, several: bool = False, json_numbers: bool = False) -> Any:
    """Return the value of a YAML text, or the list of several documents; raise InputError.

    The values are of JSON, or dates, and there are no merge keys: a few of them make gigabytes.
    With `json_numbers` 1e-3 is a number, which PyYAML reads and writes as text.
    """
    import yaml  # only where there is some

    loader = _loader(json_numbers)
    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"it has more than {LARGEST_YAML:,} characters")
        _check_depth(text, loader)
        value = list(yaml.load_all(text, loader)) if several else yaml.load(text, loader)  # noqa: S506
        _check_size(value)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise InputError(f"is not YAML: {one_line(error.problem)}{line}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"is not YAML: {one_line(error)}") from None
    return value


def _check_depth(text: str, loader: Any) -> None:
    """Raise MarkedYAMLError for a text whose nesting would crash its loader."""
    import yaml

    depth = 0
    for event in yaml.parse(text, loader):
        mark: Any = event.start_mark
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="it is nested too deep", problem_mark=mark)


def _check_size(value: Any) -> None:
    """Raise ValueError or TypeError for a value that is no JSON, refers to itself, or is large."""
    size = 0
    for part in json.JSONEncoder(allow_nan=False, default=_date).iterencode(value):
        size += len(part)
        if size > LARGEST_YAML:
            raise ValueError(f"it stands for more than {LARGEST_YAML:,} characters")


def _date(value: Any) -> str:
    if isinstance(value, date):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} is not of JSON")


@cache
def _loader(json_numbers: bool) -> Any:
    """Return a loader whose errors have a line, without numbers and keys that are no JSON."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            """Leave merge keys, for which there is no constructor then; refuse a key twice."""
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name = str(self.construct_object(key, deep=True))
                line = key.start_mark.line + 1
                if name in lines:
                    places = f"in line {lines[name]} and in line {line}: keep one of them"
                    problem = f"the key {one_line(name, 64)} stands twice, {places}"
                    raise yaml.constructor.ConstructorError(problem=problem)
                lines[name] = line

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                    raise ValueError(f"a number has more than {_LONGEST_NUMBER} characters")
                return super().construct_object(node, deep)
            except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
                problem = one_line(error)
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    if json_numbers:
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    return Loader


_MARKUP = {ord(character): f"&#{ord(character)};" for character in "&\\`*_[]|<>"}


def cell(text: str) -> str:
    """Return `text` escaped for a cell of a Markdown table."""
    return printable(" ".join(text.translate(_MARKUP).split()))


def code(text: str) -> str:
    """Return `text` for use between two backticks, which it cannot close."""
    return printable(text).replace("`", "'")


def unexpanded(text: str) -> str:
    """Return text escaped for a container, where Kubernetes expands $(NAME) and $$ is one $."""
    return text.replace("$", "$$")


def printable(text: str) -> str:
    """Return `text` with control and bidirectional characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def human(size: float) -> str:
    """Return a number of bytes as text: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 1 epoch, 2 epochs."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def facts(values: Mapping[str, str]) -> list[str]:
    """Return a line for each value that is not empty, after its name."""
    return [f"  {name:<12}{value}" for name, value in values.items() if value]


def bar(share: float, width: int) -> str:
    """Return a bar such as `██████░░░░` for a share of at most 1."""
    filled = int(share * width)
    return "█" * filled + "░" * (width - filled)


_ALIKE = str.maketrans(
    "‘’‛ʼʻʹ′`´“”„‟″ʺ\u2212\u2043\u02d7АВЕКМНОРСТХЅІЈаеорсухіјѕΑΒΕΖΗΙΚΜΝΟΡΤΥΧο",
    "'''''''''\"\"\"\"\"\"---ABEKMHOPCTXSIJaeopcyxijsABEZHIKMNOPTYXo",
    "\u034f\u115f\u1160\u2800\u3164" + "".join(map(chr, range(0xFE00, 0xFE10))),
)
"""Characters that look like others, and characters without a picture."""


def same_text(text: str) -> str:
    """Return the one form of texts that differ by code points only, as é and e with an accent."""
    return unicodedata.normalize("NFC", text)


def look(text: str) -> str:
    """Return a form that is equal for texts which look alike; the case of one letter counts."""
    plain = unicodedata.normalize("NFKC", text.translate(_ALIKE))
    line = " ".join("".join(map(_drawn, plain)).split())
    return line if len(line) == 1 else line.lower()


def _drawn(character: str) -> str:
    """Return a character as it looks: any dash is '-', and some are not seen."""
    kind = unicodedata.category(character)
    if kind == "Cf":
        return ""
    return "-" if kind == "Pd" else character
