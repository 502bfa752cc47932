"""The component `job`: its inputs and settings become one LaunchSpec, as its README says."""

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
from kfp_ddp.jobs.kinds import KINDS, KindName
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.script import WORD, words

OF_THE_STEP = {"run_id", "task_name", "task_id", "work_dir", "job_object", "task_config"}
README = Path(inspect.getfile(job.python_func)).with_name("README.md").read_text()
PARAMETERS = dict(inspect.signature(job.python_func).parameters)
INPUTS = {name: item.default for name, item in PARAMETERS.items()}
INPUTS = {name: INPUTS[name] for name in INPUTS.keys() - OF_THE_STEP - {"settings"}}
INPUTS["image"] = "a:1"
FIELDS = LaunchSpec.model_fields


def specification(**fields: Any) -> LaunchSpec:
    """Return the specification of inputs and further settings."""
    settings = {name: value for name, value in fields.items() if name not in INPUTS}
    inputs = {**INPUTS, **{name: fields[name] for name in fields.keys() & INPUTS.keys()}}
    return engine.specification(settings, dsl.TaskConfig(), **inputs)


def test_inputs_are_settings_with_their_defaults_and_descriptions() -> None:
    assert specification() == LaunchSpec.create(image="a:1")
    assert len(PARAMETERS) <= 16
    for name in INPUTS:
        text = job.component_spec.inputs[name].description
        assert " ".join(text.split()) == FIELDS[name].description


def test_inputs_settings_and_the_task_become_one_specification() -> None:
    """KFP passes numbers as floats."""
    task = dsl.TaskConfig(node_selector={"zone": "a"})
    inputs = {**INPUTS, "nodes": 2.0, "command": ["a"]}
    spec = engine.specification({"shm_size": "1Gi", "retries": 3.0}, task, **inputs)
    assert spec == LaunchSpec.create(
        image="a:1", nodes=2, command=["a"], shm_size="1Gi", retries=3, node_selector={"zone": "a"}
    )


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_a_setting_that_is_an_input_is_refused_in_settings(name: str) -> None:
    with pytest.raises(InputError, match=f"^settings sets {name}, which is an input of its own$"):
        engine.specification({name: "4"}, dsl.TaskConfig(), **INPUTS)


def test_a_word_that_kfp_would_change_is_packed() -> None:
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
    monkeypatch.setattr(engine, "run", lambda **fields: str(reached.update(fields)))
    fields = {name: object() for name in PARAMETERS}
    job.python_func(**fields)
    assert reached == fields
    assert fields.keys() - named == INPUTS.keys()


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
    result = runpy.run_path(str(tmp_path / "example.py"))["example"]
    compiler.Compiler().compile(result, str(tmp_path / "example.yaml"))
    assert "job" in yaml.safe_load((tmp_path / "example.yaml").read_text())["root"]["dag"]["tasks"]


def test_the_readme_lists_what_each_kind_does_not_support() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", _section("Kinds"), re.MULTILINE))
    assert set(rows) == set(typing.get_args(KindName))
    for kind, text in rows.items():
        named = re.findall(r"`(\w+)`", text)
        allowed = [value for item in KINDS[kind].unsupported for value in item.allowed]
        assert sorted(named) == sorted([u.setting for u in KINDS[kind].unsupported] + allowed)


def test_the_readme_names_the_settings_that_are_inputs() -> None:
    named = re.findall(r"`(\w+)`", _section("Settings").split(" are inputs")[0])
    assert set(named) == set(INPUTS)


def _section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
