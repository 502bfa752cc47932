"""The inputs of `job` from a function, a file or a folder: `job(**as_function(train), ...)`."""

import __future__

import ast
import builtins
import dis
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import ARCHIVE, WORD, fitting, pack, pack_file, pack_text
from kfp_ddp.jobs.requirements import locked
from kfp_ddp.jobs.shipping import code as folder_of

__all__ = ["as_folder", "as_function", "as_script", "locked"]

# Characters that KFP, Kubernetes and YAML do not change.
PLAIN = re.compile(r"[\w ./:,;=@%+-]*", re.ASCII)


def as_function(
    func: Callable[..., Any], func_args: Mapping[str, Any] | None = None, later: Iterable[str] = ()
) -> dict[str, Any]:
    """Return inputs of `job` with which every worker calls a function.

    The function imports what it uses inside itself. `func_args` are its arguments by name: strings,
    numbers, booleans, None, lists and dicts. `later` are names of arguments given when the pipeline
    runs, as name=value in `args`. InputError for what cannot be transferred.
    """
    function = _plain(func)
    func_args = func_args or {}
    name = function.__name__
    text = _source_of(function)
    text = _with_postponed(function, text, _definition(name, text))
    _check_complete(name, text)
    arguments = _as_json(name, func_args)
    try:
        inspect.signature(function).bind(**{**func_args, **dict.fromkeys(later)})
    except TypeError as error:
        raise InputError(f"func_args do not fit {name}: {error}") from None
    text += CALL.format(arguments=arguments, name=name)
    return {"script": pack_text(text, f"function {name}")}


def has_one_process(func: Callable[..., Any]) -> bool:
    """Return whether a function divides batches among the GPUs by itself, by DataParallel.

    As a rank for each GPU, it would run as often, on all GPUs each time.
    """
    tree = ast.parse(_source_of(func))
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
    return "DataParallel" in names and "init_process_group" not in names


def _source_of(function: Callable[..., Any]) -> str:
    """Return the lines that define a function, at the top of a program; InputError for none."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        raise InputError(f"{function.__name__} has no source: define it in a file") from None
    end = "" if source.endswith("\n") else "\n"
    return (INDENTED if source[:1].isspace() else "") + source + end


def as_script(path: str | Path, args: Sequence[str] = ()) -> dict[str, Any]:
    """Return inputs of `job` with which every worker runs a Python file; raises as `pack_file`."""
    return {"script": pack_file(path), "args": words(args)}


def as_folder(
    path: str | Path, entry: str, args: Sequence[str] = (), upload: str = ""
) -> dict[str, Any]:
    """Return inputs of `job` with which every worker runs a file or a module of a folder.

    Hidden files and `__pycache__` are left out. `entry` is a file such as train.py, or a module
    such as package.train. With `upload` the packed folder is put there, named by its digest:
    gs://bucket/prefix, another bucket, or a folder on a PVC that the workers mount at this path; ''
    puts it into the pipeline itself. InputError for a folder that cannot be packed, lacks the
    entry, or is too large.
    """
    archive = folder_of.archive_of(path)
    folder_of.check(archive, entry)
    what = f"folder {path}"
    code = _upload(archive, upload) if upload else fitting(pack(archive, ARCHIVE), what)
    return {"code": code, "entry": entry, "args": words(args)}


def words(arguments: Iterable[str]) -> list[str]:
    """Return arguments for the input `args`, packed if a system on the way would change them."""
    return [
        word if PLAIN.fullmatch(word) and not word.startswith(WORD) else pack(word.encode(), WORD)
        for word in arguments
    ]


def _upload(archive: bytes, upload: str) -> str:
    from kfp_ddp.storage.kinds import open_store

    name = folder_of.digest_of(archive) + folder_of.SUFFIX
    destination = open_store(upload)
    destination.prepare()
    destination.write(name, archive)
    return f"{upload.rstrip('/')}/{name}"


# For a function of a module that begins so; in others annotations inside of it are evaluated.
HEADER = "from __future__ import annotations\n"
# The lines of an indented function are not changed, since they may be inside a string.
INDENTED = "if True:\n"
DECORATED = "is decorated, and its decorator is not packed: remove it"
# Steps of Python's code that look up a global name, the last one from 3.12 on, or set one.
LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
STORES = ("STORE_GLOBAL", "STORE_NAME")
# An argument name=value of the job adds or replaces one: a value known when the pipeline runs.
CALL = """

if __name__ == "__main__":
    import json as _json
    import sys as _sys

    _arguments = _json.loads({arguments!r})
    for _word in _sys.argv[1:]:
        _name, _equals, _value = _word.partition("=")
        if not _equals:
            raise SystemExit("error: " + repr(_word) + " is not an argument; write name=value")
        try:
            _arguments[_name] = _json.loads(_value)
        except ValueError:
            _arguments[_name] = _value
    {name}(**_arguments)
"""


def _plain(func: object) -> FunctionType:
    """Return the function; InputError if its source alone cannot define it again."""
    name = getattr(func, "__name__", type(func).__name__)
    if inspect.ismethod(func) or not isinstance(func, FunctionType):
        raise InputError(f"{name} is not a plain Python function: give one defined with `def`")
    awaits = inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func)
    enclosed = ", ".join(func.__code__.co_freevars)
    problems = {
        "is a lambda: give a function defined with `def`": name == "<lambda>",
        "is async, and nothing awaits it: call asyncio.run inside it": awaits,
        "is a generator, so calling it runs nothing: return instead": (
            inspect.isgeneratorfunction(func)
        ),
        DECORATED: hasattr(func, "__wrapped__"),
        f"uses {enclosed} of the enclosing function: make it an argument": bool(enclosed),
    }
    for problem, applies in problems.items():
        if applies:
            raise InputError(f"{name} {problem}")
    return func


def _definition(name: str, text: str) -> ast.FunctionDef:
    """Return the one function of a source; raise InputError if it has none, or a decorated one."""
    no_function = f"the source of {name} is not a function: define it with `def`, on own lines"
    try:
        tree = ast.parse(text)
        _compiled(text)
    except SyntaxError as error:
        raise InputError(f"{no_function} ({error.msg})") from None
    definition = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)), None)
    if definition is None or definition.name != name:
        raise InputError(no_function)
    if definition.decorator_list:
        raise InputError(f"{name} {DECORATED}")
    return definition


def _with_postponed(function: FunctionType, text: str, definition: ast.FunctionDef) -> str:
    """Return the text with annotations of the signature as text: they may be of its module."""
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        return HEADER + text
    lines = text.encode().split(b"\n")
    arguments = [node for node in ast.walk(definition.args) if isinstance(node, ast.arg)]
    written = filter(None, [definition.returns, *(node.annotation for node in arguments)])
    for node in sorted(written, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        first = node.lineno - 1
        last = cast("int", node.end_lineno) - 1
        breaks = "\n" * (last - first)  # so that all lines keep their numbers
        quoted = f"({ast.unparse(node)!r}{breaks})".encode()
        changed = lines[first][: node.col_offset] + quoted + lines[last][node.end_col_offset :]
        lines[first : last + 1] = changed.split(b"\n")
    return b"\n".join(lines).decode()


def _compiled(text: str) -> CodeType:
    return compile(text, "script.py", "exec", dont_inherit=True)


def _check_complete(name: str, text: str) -> None:
    """Raise InputError for names of the function's module that the code would look up."""
    steps = list(chain.from_iterable(map(dis.get_instructions, _codes(_compiled(text)))))
    used = {step.argval for step in steps if step.opname in LOADS}
    assigned = {step.argval for step in steps if step.opname in STORES}
    if missing := sorted(used - assigned - {*dir(builtins), "__annotations__"}):
        raise InputError(
            f"{name} uses {', '.join(missing)} of its module, which is not packed: import or "
            "define it inside the function"
        )


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and all code that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _as_json(name: str, func_args: Mapping[str, Any]) -> str:
    """Return the arguments as JSON, if they come back from it unchanged."""
    for key, value in func_args.items():
        if hasattr(value, "pattern") and hasattr(value, "channel_type"):
            raise InputError(
                f"func_args[{key!r}] is known only when the pipeline runs: name it in later, and "
                f"hand args a list with the word {key}=value"
            )
        try:
            text = json.dumps(value, allow_nan=False)
            # 1, 1.0 and True are equal, but their texts differ.
            same = repr(json.loads(text)) == repr(value)
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise InputError(
                f"func_args[{key!r}] of {name} does not come back from JSON unchanged: "
                "give strings, numbers, booleans, None, and lists and dicts of them"
            )
    return json.dumps(dict(func_args), allow_nan=False)
