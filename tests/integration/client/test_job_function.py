"""A Python function as a job: its source and its arguments arrive to the byte, or it is refused."""

import functools
import importlib.util
import json
import re
import string
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kfp import dsl

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.shipping.authoring import as_function
from tests import workers
from tests.workers import specification

HARD = [
    *("$HOME", "$$", "$(PATH)", "$(KFP_DDP_NODE)", "`id`", "'\"", "\\n", "{{x}}", "%s"),
    *("∑模型", "#"),
]
TEXT = st.lists(
    st.sampled_from([*HARD, "\\", '"""', "\u2028", "\x7f"]) | st.text(max_size=9), max_size=6
)
JSON = st.recursive(
    TEXT.map("".join)
    | st.sampled_from([True, False, None, -0.0, 1e308, 5e-324, 10**30, "\r\n", "\ud800", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(HARD), inner),
    max_leaves=6,
)


def imported(folder: Path, source: bytes) -> ModuleType:
    """The module of a file."""
    file = folder / f"module_{abs(hash(source))}.py"
    file.write_bytes(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@st.composite
def modules(draw: st.DrawFn) -> tuple[bytes, str]:
    """A module whose make() returns a function, indented or not, and the text in the function."""
    letters = st.sampled_from([*HARD, "\t", "ä", "∑"]).map(lambda part: part.replace("'", '"'))
    content = "".join(draw(st.lists(letters, max_size=6))).replace("\\", "/")
    depth, margin = draw(st.integers(0, 3)), draw(st.sampled_from(["    ", "\t"]))
    body = [
        "def work(*, given, more=({'a': 1}, 'ö$')):",
        f"{margin}import json, sys",
        *["# less indented"] * draw(st.integers(0, 1)),
        f"{margin}def inner(x):",
        f"{margin}{margin}return [x for x in (x, more[1])]",
        f"{margin}held = '''{content}",
    ]
    nested = [f"{'    ' * depth}{line}" for line in body]
    nested += [" not indented as the code is", "'''"]
    nested += [f"{'    ' * depth}{margin}sys.stdout.write(json.dumps([given, held, inner(1)]))"]
    above = [f"{'    ' * at}def level_{at}():" for at in range(depth)]
    below = [
        f"{'    ' * (at + 1)}return {'work' if at + 1 == depth else f'level_{at + 1}()'}"
        for at in reversed(range(depth))
    ]
    last = f"make = {'level_0' if depth else 'lambda: work'}\n"
    source = "\n".join([*above, *nested, *below, last])
    mark, end = draw(st.sampled_from(["", "\ufeff"])), draw(st.sampled_from(["\n", "\r\n"]))
    return (mark + source.replace("\n", end)).encode(), f"{content}\n not indented as the code is\n"


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(module=modules(), argument=JSON, by_map=st.booleans())
def test_a_function_runs_in_a_worker_as_it_was_written(
    tmp_path: Path, module: tuple[bytes, str], argument: Any, by_map: bool
) -> None:
    written, content = module
    inputs = as_function(imported(tmp_path, written).make(), {"given": argument})
    done = workers.run(specification(inputs), Path(tempfile.mkdtemp(dir=tmp_path)), by_map=by_map)
    assert done.returncode == 0, (written.decode(), done.stderr.decode())
    assert done.stdout.decode() == json.dumps([argument, content, [1, "ö$"]]), written.decode()


def plain(lr: float) -> None:
    print(json_of(lr))


def json_of(*_: Any) -> str:
    return ""


def alone(lr: float, name: str = "a", *, more: Any = None) -> None:
    print(repr((lr, name, more)))


def test_arguments_known_at_run_time(tmp_path: Path) -> None:
    inputs = as_function(alone, {"name": "remaining"}, later=["lr"])
    words = ["lr=0.5", "more=a=b $(PATH)"]
    done = workers.run(specification({**inputs, "args": words}), tmp_path / "a")
    assert done.stdout.decode() == "(0.5, 'remaining', 'a=b $(PATH)')\n"
    lacking = workers.run(specification(inputs), tmp_path / "b")
    assert "missing 1 required positional argument: 'lr'" in lacking.stderr.decode()
    wrong = workers.run(specification({**inputs, "args": ["lr"]}), tmp_path / "c")
    assert wrong.stderr.decode() == "error: 'lr' is not an argument; write name=value\n"


# fmt: off
def annotated(
    lr: "float", where: Path | None = None,  # a comment, ->
    *others: list[
        Path
    ],
    ünïcode: Any = ("a", 1), **remaining: Path,
) -> list[Path]:
    content: Any = {"->": where, ": Path": (others, ünïcode, remaining)}
    print(content)
    return []
# fmt: on


def test_annotations_of_a_signature_may_be_of_its_module(tmp_path: Path) -> None:
    done = workers.run(specification(as_function(annotated, {"lr": 1})), tmp_path / "a")
    assert done.stdout.decode() == "{'->': None, ': Path': ((), ('a', 1), {})}\n"
    assert done.returncode == 0, done.stderr.decode()


TYPED = """
from pathlib import Path
def work(where: Path, *others: Path, more: list[
        Path  # ends here
    ] = None, **rest: 'Path') -> dict[str,
        Path]:
    import sys
    from dataclasses import dataclass, fields
    from functools import singledispatch
    @dataclass
    class Options:
        rate: float = 0.1
    @singledispatch
    def kind(x):
        return "object"
    @kind.register
    def of_number(x: float) -> str:
        return "number"
    held: Path = where
    frame = sys._getframe()
    line = frame.f_lineno - frame.f_code.co_firstlineno
    print([one.type for one in fields(Options)], kind(2.0), of_number.__annotations__, held, line)
"""


@pytest.mark.parametrize("above", ["", "from __future__ import annotations\n"])
def test_annotations_mean_what_they_do_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], above: str
) -> None:
    module = imported(tmp_path, (above + TYPED).encode())
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclass looks there
    func = module.work
    func("x")
    here = capsys.readouterr().out
    assert ("<class 'float'>" in here) == (not above)
    done = workers.run(specification(as_function(func, {"where": "x"})), tmp_path / "a")
    assert (done.stdout.decode(), done.stderr.decode()) == (here, "")


def around() -> Callable[..., Any]:
    outer = 1

    def closing() -> int:
        return outer

    return closing


def passing(func: Any) -> Any:
    return func


@passing
def decorated() -> None: ...


async def waits() -> None: ...


def yields() -> Any:
    yield 1


def of_module() -> Any:
    def inside():  # type: ignore[no-untyped-def]
        return [json.dumps(Path) for _ in ()]

    return inside


def defaults(where: str = string.digits) -> None: ...


def inner_type() -> None:
    def inside(where: Path) -> None: ...

    inside(Path())


class Holder:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("func", "says"),
    [
        *((lambda: 1, "is a lambda"), (around(), "closing uses outer of the enclosing function")),
        (decorated, "decorated is decorated"),
        (functools.partial(alone, 1), "partial is not a plain Python function"),
        *((waits, "waits is async"), (yields, "yields is a generator")),
        (of_module, "of_module uses Path, json of its module"),
        (plain, "plain uses json_of of its module"),
        (defaults, "defaults uses string of its module"),
        (inner_type, "inner_type uses Path of its module"),
        (Holder(), "Holder is not a plain Python function"),
        (print, "print is not a plain Python function"),
    ],
)
def test_an_incomplete_function_is_an_input_error(func: Any, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        as_function(func, {"lr": 1})


def test_a_function_without_a_file_is_an_input_error() -> None:
    space: dict[str, Any] = {}
    exec("def typed(): pass", space)
    with pytest.raises(InputError, match=r"^typed has no source: define it in a file$"):
        as_function(space["typed"])


@pytest.mark.parametrize(
    "bad",
    [
        *((1, 2), {1: 2}, b"a", float("nan"), Path("a"), pytest.param(object(), id="object")),
        [1, (2,)],
    ],
    ids=repr,
)
def test_arguments_that_json_would_change_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match=r"^func_args\['lr'\] of alone does not come back"):
        as_function(alone, {"lr": bad})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "missing a required argument: 'lr'"),
        ({"lr": 1, "rl": 2}, "got an unexpected keyword argument 'rl'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^func_args do not fit alone: {says}$"):
        as_function(alone, arguments)


def test_a_parameter_of_the_pipeline_is_no_argument_yet() -> None:
    message = []

    @dsl.pipeline  # type: ignore[untyped-decorator]
    def pipeline(lr: float) -> None:
        with pytest.raises(InputError) as error:
            as_function(alone, {"lr": lr})
        message.append(str(error.value))
        _nothing()

    assert message[0] == (
        "func_args['lr'] is known only when the pipeline runs: name it in later, and hand args a "
        "list with the word lr=value"
    )


@dsl.component(base_image="a:1")  # type: ignore[untyped-decorator]
def _nothing() -> None: ...


def test_a_function_too_large_for_a_pipeline_is_refused() -> None:
    with pytest.raises(InputError, match=r"^function alone is packed into 2\d\d,\d{3} bytes, and"):
        as_function(alone, {"lr": "x" * 170_000})
