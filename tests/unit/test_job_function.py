"""A Python function as a job: its source and its arguments arrive to the byte, or it is refused."""

import base64
import functools
import importlib.util
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import engine
from kfp_ddp.jobs.authoring import as_function
from kfp_ddp.jobs.launch_spec import LaunchSpec
from tests import workers

HARD = [
    "$HOME",
    "$$",
    "$(PATH)",
    "$(KFP_DDP_NODE)",
    "`id`",
    "'\"",
    "\\n",
    "{{x}}",
    "%s",
    "∑模型",
    "#",
]
CASES = [40, pytest.param(400, marks=pytest.mark.soak)]


def specification(inputs: dict[str, Any], kind: str = "tfjob") -> LaunchSpec:
    """The job of some inputs, as the component makes it."""
    given = {"image": "a:1", "kind": kind, **inputs}
    return engine.specification({}, dsl.TaskConfig(), **given)


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


def text(chance: random.Random) -> str:
    """A text of everything that something on the way might change."""
    letters = string.printable.replace("\r", "") + "äß∑模\u2028\x7f"
    parts = [*HARD, "".join(chance.choices(letters, k=9)), "\\", '"""', "'''"]
    return "".join(chance.choices(parts, k=chance.randint(0, 6)))


def value(chance: random.Random, depth: int = 2) -> Any:
    """A value that JSON has."""
    kinds: list[Callable[[], Any]] = [
        lambda: text(chance) + chance.choice(("", "\r\n", "\ud800", "\0")),
        lambda: chance.choice((True, False, None, -0.0, 1e308, 5e-324, 10**30)),
        lambda: chance.random(),
    ]
    if depth:
        kinds += [
            lambda: [value(chance, depth - 1) for _ in range(chance.randint(0, 3))],
            lambda: {text(chance): value(chance, depth - 1) for _ in range(chance.randint(0, 3))},
        ]
    return chance.choice(kinds)()


def source(chance: random.Random) -> tuple[bytes, str]:
    """A module with a function `make()` that gives the function, and the text that it holds.

    The function may be indented, and its lines end as those of any system, or begin with a mark.
    """
    held = re.sub("'+", "'", text(chance)).replace("\\", "/").rstrip("'")
    depth = chance.randint(0, 3)
    lines = ["def work(*, given, more=({'a': 1}, 'ö$')):"]
    lines += ["\timport json, sys" if chance.random() < 0.3 else "    import json, sys"]
    margin = lines[1][: len(lines[1]) - len(lines[1].lstrip())]
    lines += ["# less indented than all"] * chance.randint(0, 1)
    lines += [f"{margin}held = '''{held}"]
    lines += [" not indented as the code is", "", "'''", f"{margin}def inner(x):"]
    lines += [f"{margin}{margin}return [x for x in (x, more[1])]"]
    lines += [f"{margin}sys.stdout.write(json.dumps([given, held, inner(1)]))"]
    above = [f"{'    ' * at}def level_{at}():" for at in range(depth)]
    inside = [f"{'    ' * depth}{lines[0]}"]
    string_open = False
    for line in lines[1:]:
        inside.append(line if string_open else f"{'    ' * depth}{line}")
        string_open ^= line.count("'''") == 1
    below = [
        f"{'    ' * (at + 1)}return {'work' if at + 1 == depth else f'level_{at + 1}()'}"
        for at in reversed(range(depth))
    ]
    below += [f"make = {'level_0' if depth else 'lambda: work'}", ""]
    end = chance.choice(("\n", "\r\n"))
    whole = (
        end.join([*above, *inside, *below])
        if end == "\n"
        else "\n".join([*above, *inside, *below]).replace("\n", "\r\n")
    )
    mark = "\ufeff" if chance.random() < 0.3 else ""
    return (mark + whole).encode(), f"{held}\n not indented as the code is\n\n"


@pytest.mark.parametrize("cases", CASES)
def test_functions_made_by_chance_run_in_a_worker_as_they_were_written(
    tmp_path: Path, cases: int
) -> None:
    chance = random.Random(cases)
    for number in range(cases):
        written, held = source(chance)
        given = value(chance)
        inputs = as_function(imported(tmp_path, written).make(), {"given": given})
        spec = specification(inputs)
        done = workers.run(spec, tmp_path / str(number), by_map=number % 2 == 0)
        assert done.returncode == 0, (written.decode(), done.stderr.decode())
        found = json.loads(done.stdout)
        assert json.dumps(found) == json.dumps([given, held, [1, "ö$"]]), written.decode()


def plain(lr: float) -> None:
    print(json_of(lr))


def json_of(*_: Any) -> str:
    return ""


def alone(lr: float, name: str = "a", *, more: Any = None) -> None:
    print(repr((lr, name, more)))


def test_what_is_known_when_the_pipeline_runs_comes_as_words(tmp_path: Path) -> None:
    inputs = as_function(alone, {"name": "kept"}, later=["lr"])
    words = ["lr=0.5", "more=a=b $(PATH)"]
    done = workers.run(specification({**inputs, "args": words}), tmp_path / "a")
    assert done.stdout.decode() == "(0.5, 'kept', 'a=b $(PATH)')\n"
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
    ünïcode: Any = ("a", 1), **kept: Path,
) -> list[Path]:
    held: Any = {"->": where, ": Path": (others, ünïcode, kept)}
    print(held)
    return []
# fmt: on


def test_annotations_of_a_signature_may_be_of_its_module(tmp_path: Path) -> None:
    done = workers.run(specification(as_function(annotated, {"lr": 1})), tmp_path / "a")
    assert done.stdout.decode() == "{'->': None, ': Path': ((), ('a', 1), {})}\n"
    assert done.returncode == 0, done.stderr.decode()


def around() -> Callable[..., Any]:
    outer = 1

    def closing() -> int:
        return outer

    return closing


@functools.lru_cache
def cached() -> None: ...


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


class Holder:
    base = Path

    def method(self) -> None: ...

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("func", "says"),
    [
        (lambda: 1, "a lambda has no name"),
        (around(), "closing uses outer of the enclosing function"),
        (cached, "cached is not a Python function"),
        (decorated, "decorated is decorated"),
        (functools.wraps(plain)(lambda: 1), "plain is decorated"),
        (functools.partial(alone, 1), "partial is not a Python function"),
        (waits, "waits is async, and nothing awaits it"),
        (yields, "yields yields"),
        (of_module, "of_module uses Path, json of its module"),
        (plain, "plain uses json_of of its module"),
        (defaults, "defaults uses string of its module"),
        (Holder().method, "method is a method of an object"),
        (Holder(), "Holder is not a Python function"),
        (Holder, "Holder is not a Python function"),
        (print, "print is not a Python function"),
        ("train.py", "str is not a Python function"),
        (None, "NoneType is not a Python function"),
    ],
)
def test_a_function_that_is_not_all_in_its_source_is_one_line(func: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        as_function(func, {"lr": 1})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_without_a_file_is_one_line() -> None:
    space: dict[str, Any] = {}
    exec("def typed(): pass", space)
    with pytest.raises(InputError, match=r"^typed has no source: define it in a file$"):
        as_function(space["typed"])


@pytest.mark.parametrize(
    "bad",
    [
        (1, 2),
        {1: 2},
        b"a",
        float("nan"),
        float("inf"),
        {1},
        Path("a"),
        pytest.param(object(), id="object"),
        [1, (2,)],
    ],
    ids=repr,
)
def test_arguments_that_json_would_change_are_one_line(bad: Any) -> None:
    with pytest.raises(InputError, match=r"^func_args\['lr'\] of alone does not come back"):
        as_function(alone, {"lr": bad})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "missing a required argument: 'lr'"),
        ({"lr": 1, "rl": 2}, "got an unexpected keyword argument 'rl'"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^func_args do not fit alone: {says}$"):
        as_function(alone, given)


def test_a_parameter_of_the_pipeline_is_no_argument_yet() -> None:
    said = []

    @dsl.pipeline  # type: ignore[untyped-decorator]
    def pipeline(lr: float) -> None:
        with pytest.raises(InputError) as error:
            as_function(alone, {"lr": lr})
        said.append(str(error.value))
        _nothing()

    assert said[0] == (
        "func_args['lr'] is known only when the pipeline runs: name it in later, and hand args a "
        "list with the word lr=value"
    )


@dsl.component(base_image="a:1")  # type: ignore[untyped-decorator]
def _nothing() -> None: ...


def test_a_function_too_large_for_a_pipeline_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^function alone is packed into 2\d\d,\d{3} bytes, and"):
        as_function(alone, {"lr": "x" * 170_000})


def test_it_is_one_plain_line_in_the_pipeline() -> None:
    line = as_function(alone, {"lr": "$$ {{$.x}}\n"})["script"]
    assert not set(line) & set("$\n\"'\\{}")
    assert "\\n" in base64.b64decode(line.partition(",")[2]).decode()
