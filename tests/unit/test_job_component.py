"""The component `job`: every setting of a job reaches its specification, once."""

import inspect
import re
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from kfp_ddp.components.job.component import job
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import engine
from kfp_ddp.jobs.code import as_data_url
from kfp_ddp.jobs.kinds import KINDS, KindName
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.script import WORD, packed, words

OF_THE_STEP = {"run_id", "task_name", "task_id", "work_dir", "job_object", "task_config"}
README = Path(inspect.getfile(job.python_func)).with_name("README.md").read_text()
PARAMETERS = dict(inspect.signature(job.python_func).parameters)
INPUTS = {name: each.default for name, each in PARAMETERS.items()}
INPUTS = {name: INPUTS[name] for name in INPUTS.keys() - OF_THE_STEP - {"settings"}}
INPUTS["image"] = "a:1"
FIELDS = LaunchSpec.model_fields
EXAMPLES: dict[str, Any] = {
    "elastic": "1:2",
    "resources": {"limits": {"cpu": "4"}},
    "claims": {"/data": "images:ro"},
    "capabilities": ["IPC_LOCK"],
    "rdma_resource": "rdma/hca",
    "code": as_data_url(b"archive"),
    "entry": "train.py",
    "packages_to_install": ["timm==1.0.0"],
    "pip_index_urls": ["https://example.com/simple"],
}
# What a setting cannot be given without.
WITH: dict[str, dict[str, Any]] = {
    "runtime": {"kind": "trainjob"},
    "queue": {"scheduler": "kueue"},
    "rdma_resource": {"nccl_infiniband": "on"},
    "code": {"entry": "train.py"},
    "entry": {"code": as_data_url(b"archive")},
    "packages_to_install": {"command": ["a"]},
    "pip_index_urls": {"packages_to_install": ["timm==1.0.0"], "command": ["a"]},
}


def other(name: str) -> Any:
    """A value of a setting that is not its default, as KFP hands it over: numbers are floats."""
    default, annotation = FIELDS[name].default, FIELDS[name].annotation
    if name in EXAMPLES:
        return EXAMPLES[name]
    if choices := LaunchSpec.choices(name):
        return choices[-1]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return float(default + 1)
    if annotation is str:
        return "4"
    if typing.get_origin(annotation) is dict:
        return {"a": "b"}
    return [{"a": "b"}] if "dict" in str(annotation) else ["a"]


def specification(**given: Any) -> LaunchSpec:
    """What the component makes of its inputs and of further settings."""
    settings = {name: value for name, value in given.items() if name not in INPUTS}
    inputs = {**INPUTS, **{name: given[name] for name in given.keys() & INPUTS.keys()}}
    return engine.specification(settings, dsl.TaskConfig(), **inputs)


def test_inputs_are_settings_with_their_defaults() -> None:
    assert INPUTS.keys() <= FIELDS.keys()
    assert specification() == LaunchSpec.create(image="a:1")
    assert len(PARAMETERS) <= 16


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_a_setting_that_is_an_input_is_described_as_everywhere(name: str) -> None:
    text = job.component_spec.inputs[name].description
    assert " ".join(text.split()) == FIELDS[name].description


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_reaches_the_specification_and_no_other(name: str) -> None:
    """A setting that is dropped on the way would do nothing."""
    more = WITH.get(name, {})
    spec = specification(**more, **{name: other(name)})
    changed = {field for field in FIELDS if getattr(spec, field) != getattr(specification(), field)}
    assert changed == {name, *more}
    assert spec == LaunchSpec.create(**{"image": "a:1", **more, name: other(name)})


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_a_setting_that_is_an_input_has_one_door(name: str) -> None:
    with pytest.raises(InputError, match=f"^settings sets {name}, which is an input of its own$"):
        engine.specification({name: other(name)}, dsl.TaskConfig(), **INPUTS)


def test_a_packed_script_is_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print('$$')\n")
    assert specification(script=packed(file)).script == "print('$$')\n"


def test_a_word_that_would_change_on_the_way_is_unpacked() -> None:
    hard = ["--a", "$(HOME) $$", "∑\n", "", "data:text/plain;base64,", WORD + "!"]
    packed_words = words(hard)
    assert packed_words[0] == "--a"
    assert not set("".join(packed_words)) & set("$\n∑")
    assert specification(script="x", args=packed_words).args == tuple(hard)
    with pytest.raises(InputError, match="is not a packed word in UTF-8"):
        specification(script="x", args=[WORD + "!"])


def test_all_inputs_of_the_component_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    named = inspect.signature(engine.run).parameters.keys()
    reached: dict[str, Any] = {}
    monkeypatch.setattr(engine, "run", lambda **given: str(reached.update(given)))
    given = {name: object() for name in PARAMETERS}
    job.python_func(**given)
    assert reached == given
    assert given.keys() - named == INPUTS.keys()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_examples_of_the_readme_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "src").mkdir()
    for name in ("train.py", "src/train.py"):
        (tmp_path / name).write_text("print()")
    (tmp_path / "requirements.lock").write_text(f"timm==1.0.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(tmp_path / "example.py"))["example"]
    compiler.Compiler().compile(found, str(tmp_path / "example.yaml"))
    assert "job" in yaml.safe_load((tmp_path / "example.yaml").read_text())["root"]["dag"]["tasks"]


def test_the_readme_has_a_line_for_each_input() -> None:
    names = re.findall(r"^\| `(\w+)` \|", README.partition("## Kinds")[0], re.MULTILINE)
    assert set(names) == PARAMETERS.keys() - {"task_config"} | {"Output"}


def test_the_readme_tells_what_each_kind_has_no_place_for() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", _section("Kinds"), re.MULTILINE))
    assert set(rows) == set(typing.get_args(KindName))
    for kind, text in rows.items():
        named = re.findall(r"`(\w+)`", text)
        allowed = [value for each in KINDS[kind].unsupported for value in each.allowed]
        assert sorted(named) == sorted([u.setting for u in KINDS[kind].unsupported] + allowed)


def test_the_readme_names_the_settings_that_are_inputs() -> None:
    named = re.findall(r"`(\w+)`", _section("Settings").split(" are inputs")[0])
    assert set(named) == set(INPUTS)


def _section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
