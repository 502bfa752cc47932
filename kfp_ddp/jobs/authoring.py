"""The inputs of `job` from a function, a file or a folder: `job(**as_function(train), ...)`."""

import __future__

import ast
import builtins
import dis
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import code as folder_of
from kfp_ddp.jobs.script import carried, locked, packed, packed_text, words

__all__ = ["as_folder", "as_function", "as_script", "locked"]


def as_function(
    func: Callable[..., Any],
    func_args: Mapping[str, Any] | None = None,
    later: Iterable[str] = (),
) -> dict[str, Any]:
    """Inputs of `job` by which every worker calls the function.

    Args:
        func: A plain function that imports what it uses inside itself.
        func_args: Its arguments by name: texts, numbers, booleans, None, lists and dicts.
        later: Names of arguments that come when the pipeline runs, as words name=value in `args`.

    Raises:
        InputError: a function or arguments that cannot travel.
    """
    text = source_of(func, func_args or {}, later)
    return {"script": packed_text(text, f"function {func.__name__}")}


def as_script(path: str | Path, args: Sequence[str] = ()) -> dict[str, Any]:
    """Inputs of `job` by which every worker runs a Python file with arguments.

    Raises:
        InputError: it cannot be read, is not in UTF-8, or is too large for a pipeline.
    """
    return {"script": packed(path), "args": words(args)}


def as_folder(
    path: str | Path, entry: str, args: Sequence[str] = (), upload: str = ""
) -> dict[str, Any]:
    """Inputs of `job` by which every worker runs a file or a module in a folder of code.

    Args:
        path: The folder; hidden files and `__pycache__` stay out.
        entry: What runs: a file such as train.py, or a module such as package.train.
        args: Its arguments.
        upload: Where the packed folder is put, by its digest: gs://bucket/prefix, another bucket's
            address, or a folder on a claim that the workers mount under this very path; '' to let
            the pipeline itself carry it.

    Raises:
        InputError: a folder that cannot be packed, has no such entry or is too large to be carried.
        StorageError: a place that cannot be written.
    """
    archive = folder_of.archive_of(path)
    folder_of.check(archive, entry)
    if upload:
        code = _uploaded(archive, upload)
    else:
        code = carried(folder_of.as_data_url(archive), f"folder {path}")
    return {"code": code, "entry": entry, "args": words(args)}


def _uploaded(archive: bytes, upload: str) -> str:
    from kfp_ddp.storage.destination import open_destination

    name = folder_of.digest_of(archive) + folder_of.SUFFIX
    place = open_destination(upload)
    place.prepare()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(archive)
        place.put(file, name)
    return f"{upload.rstrip('/')}/{name}"


# What an indented function stands under: its lines are not changed, which may be inside a string.
INDENTED = "if True:\n"
OF_ANY_FILE = ("__name__", "__doc__", "__annotations__", "__conditional_annotations__")
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
# A word name=value of the job's args sets or replaces one: what is known when the pipeline runs.
CALL = """

if __name__ == "__main__":
    import json as _json
    import sys as _sys

    _given = _json.loads({arguments!r})
    for _word in _sys.argv[1:]:
        _name, _equals, _value = _word.partition("=")
        if not _equals:
            raise SystemExit("error: " + repr(_word) + " is no argument; write name=value")
        try:
            _given[_name] = _json.loads(_value)
        except ValueError:
            _given[_name] = _value
    {name}(**_given)
"""


def source_of(
    func: Callable[..., Any], func_args: Mapping[str, Any], later: Iterable[str] = ()
) -> str:
    """The text of a Python file that calls the function with these arguments.

    Args:
        func: A plain function that imports what it uses inside itself.
        func_args: Its arguments by name, of what JSON has.
        later: Names of arguments that come as words name=value when the file runs.

    Raises:
        InputError: a function that is not all in its source, or arguments that do not fit it.
    """
    function, source = _plain(func), ""
    name = function.__name__
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        raise InputError(f"{name} has no source to be found: define it in a file") from None
    if source[:1].isspace():
        source = INDENTED + source
    text = source if source.endswith("\n") else source + "\n"
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        text = "from __future__ import annotations\n" + text
    text = _alone(name, text)
    arguments = _as_json(name, func_args)
    _check_fits(function, {**func_args, **dict.fromkeys(later)})
    return text + CALL.format(arguments=arguments, name=name)


def _plain(func: object) -> FunctionType:
    """The function itself, if it is one that its source alone makes again."""
    name = getattr(func, "__name__", type(func).__name__)
    if inspect.ismethod(func):
        raise InputError(f"{name} is a method of an object, which does not travel: use a function")
    if not isinstance(func, FunctionType):
        raise InputError(f"{name} is no Python function: give one that `def` makes")
    if name == "<lambda>":
        raise InputError("a lambda has no name to be called by: give a function that `def` makes")
    if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
        raise InputError(f"{name} is async, and nothing awaits it: call asyncio.run inside it")
    if inspect.isgeneratorfunction(func):
        raise InputError(f"{name} yields, so that a call of it runs nothing: return instead")
    if hasattr(func, "__wrapped__"):
        raise InputError(f"{name} is decorated, and its decorator does not travel: take it off")
    if func.__closure__:
        names = ", ".join(func.__code__.co_freevars)
        raise InputError(
            f"{name} uses {names} of the function around it: make it an argument of {name}"
        )
    return func


def _alone(name: str, text: str) -> str:
    """The source, if it needs nothing of its module; without annotations that do.

    Raises:
        InputError: it does, or defines something else.
    """
    try:
        made = next((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)), None)
        if made is None or made.name != name:
            raise SyntaxError("it does not begin with its definition")
        if made.decorator_list:
            raise InputError(f"{name} is decorated, and its decorator does not travel: take it off")
        if _missing(name, text):
            text = _without_annotations(text, made)
        missing = _missing(name, text)
    except SyntaxError as error:
        raise InputError(
            f"the source of {name} is no function by itself ({error.msg}): define it with `def`, "
            "on lines of its own"
        ) from None
    if missing:
        raise InputError(
            f"{name} uses {', '.join(missing)} of its module, which does not travel: import or "
            "define it inside the function"
        )
    return text


def _missing(name: str, text: str) -> list[str]:
    """What a text uses and does not define."""
    code = compile(text, "script.py", "exec", dont_inherit=True)
    known = {*dir(builtins), *OF_ANY_FILE, name, *_names(code, "STORE_GLOBAL")}
    return sorted({*_names(code, *LOADS)} - known)


def _without_annotations(text: str, made: ast.FunctionDef) -> str:
    """The text with blanks for the annotations of a function's arguments and of what it returns."""
    lines = text.encode().split(b"\n")
    spec = made.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    spans = [
        ((each.lineno, each.col_offset + len(each.arg.encode())), _end(each))
        for each in every
        if each is not None and each.annotation is not None
    ]
    if made.returns is not None:
        row = made.returns.lineno
        start = lines[row - 1].rfind(b"->", 0, made.returns.col_offset)
        spans.append(((row, max(start, 0)), _end(made.returns)))
    for (first, start), (last, end) in spans:
        for row in range(first, last + 1):
            line = lines[row - 1]
            left = start if row == first else 0
            right = end if row == last else len(line)
            lines[row - 1] = line[:left] + b" " * (right - left) + line[right:]
    return b"\n".join(lines).decode()


def _end(node: ast.arg | ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _names(code: CodeType, *operations: str) -> Iterator[str]:
    """What some operations name, in this code and in all that is defined in it.

    A class looks its own names up as it does global ones.
    """
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME"}
    for each in dis.get_instructions(code):
        if each.opname in operations and each.argval not in own:
            yield str(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, *operations)


def _as_json(name: str, func_args: Mapping[str, Any]) -> str:
    """The arguments as JSON, from which the very same come back."""
    for key, value in func_args.items():
        if hasattr(value, "pattern") and hasattr(value, "channel_type"):
            raise InputError(
                f"func_args[{key!r}] is known only when the pipeline runs: name it in later, and "
                f"hand args a list with the word {key}=value"
            )
        try:
            text = json.dumps(value, allow_nan=False)
            same = _same(json.loads(text), value)
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise InputError(
                f"func_args[{key!r}] of {name} is nothing that JSON carries unchanged: "
                "give texts, numbers, booleans, None, and lists and dicts of them"
            )
    return json.dumps(dict(func_args), allow_nan=False)


def _same(found: Any, given: Any) -> bool:
    """Whether two values are alike to the type: 1, 1.0 and True are equal in Python."""
    if type(found) is not type(given):
        return False
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(_same(found[k], given[k]) for k in given)
    if isinstance(given, list):
        return len(found) == len(given) and all(map(_same, found, given))
    return bool(found == given)


def _check_fits(function: FunctionType, func_args: Mapping[str, Any]) -> None:
    """Refuse arguments that the function has not, or that it lacks."""
    try:
        inspect.signature(function).bind(**func_args)
    except TypeError as error:
        raise InputError(f"func_args do not fit {function.__name__}: {error}") from None
