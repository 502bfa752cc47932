"""The code that a job brings: a function, a script, a folder or a claim."""

import base64
import inspect
import random
import re
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from kfp_ddp.components.job.component import job
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.packed import PYTHON, WORD, pack_file
from kfp_ddp.jobs import engine
from kfp_ddp.jobs.kinds import KINDS, KindName
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import code
from kfp_ddp.jobs.shipping.authoring import as_folder, words
from kfp_ddp.jobs.shipping.payload import bring
from tests import workers
from tests.commands import call, output

OF_THE_STEP = {"run_id", "task_name", "task_id", "work_dir", "job_object", "task_config"}
README = Path(inspect.getfile(job.python_func)).with_name("README.md").read_text()
PARAMETERS = dict(inspect.signature(job.python_func).parameters)
INPUTS = {name: item.default for name, item in PARAMETERS.items()}
INPUTS = {name: INPUTS[name] for name in INPUTS.keys() - OF_THE_STEP - {"settings"}}
INPUTS["image"] = "a:1"
FIELDS = LaunchSpec.model_fields


def test_a_packed_file_is_one_plain_line_and_comes_back_to_the_byte(tmp_path: Path) -> None:
    text = "print('∑ $$ $(A) \\n')\r\n\t# no newline at the end"
    file = tmp_path / "train.py"
    file.write_bytes(text.encode())
    line = pack_file(file)
    assert not set(line) & set("$\n\"'\\{}")
    assert from_inputs(script=line).script == text
    assert from_inputs(script=text).script == text  # what is not packed stays as it is


@pytest.mark.parametrize("bad", ["data:,x", PYTHON + "=", PYTHON + "a$b=", PYTHON + "//79"])
def test_an_invalid_packed_file_is_an_input_error(bad: str) -> None:
    with pytest.raises(InputError, match="not a packed Python file"):
        from_inputs(script=bad)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be packed: .*No such file or directory.*; give a Python file in UTF-8"),
        (b"# \xe9", "cannot be packed: .*can't decode byte 0xe9.*; give a Python file in UTF-8"),
        (b"print(0)\0", "contains a NUL"),
        (b"#" * 100_000, "is packed into 133,362 bytes, .* at most 120,000"),
    ],
    ids=["missing", "latin-1", "NUL", "large"],
)
def test_an_unpackable_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "train.py"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        pack_file(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('ran')")
    return tmp_path / "code"


def specification(inputs: dict[str, Any], **more: Any) -> LaunchSpec:
    return LaunchSpec.create(image="a:1", kind="tfjob", **inputs, **more)


def in_a_bucket(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return as_folder(folder, "train.py", upload=f"file://{tmp_path}/bucket/code/")


def refused(spec: LaunchSpec, run_dir: Path | None = None) -> str:
    with pytest.raises(InputError) as error:
        bring(spec, run_dir)
    return str(error.value)


def test_small_code_from_a_bucket_travels_in_the_manifest(folder: Path, tmp_path: Path) -> None:
    uploaded = in_a_bucket(folder, tmp_path)
    digest = code.digest_in(uploaded["code"])
    assert uploaded["code"] == f"file://{tmp_path}/bucket/code/{digest}.tar.gz"
    spec = bring(specification(uploaded), None)
    assert spec == specification(as_folder(folder, "train.py"))
    assert bring(spec, None) == spec


def test_large_code_from_a_bucket_travels_by_the_work_claim(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.bin").write_bytes(random.Random(1).randbytes(900_000))
    uploaded = in_a_bucket(folder, tmp_path)
    run_dir = tmp_path / "work" / "run"
    run_dir.mkdir(parents=True)
    line = refused(specification(uploaded, claims={str(tmp_path / "work"): "work"}))
    assert line.endswith("mount a PVC on the task and set work_dir to a folder on it")
    assert "is not on a PVC that the workers mount" in refused(specification(uploaded), run_dir)
    spec = specification(uploaded, claims={str(tmp_path / "work"): "work"})
    for _ in range(2):  # the second time it is there
        result = bring(spec, run_dir)
        assert Path(result.code).is_relative_to(run_dir)
        assert Path(result.code).stat().st_mode & 0o777 == 0o644
    done = workers.run(result, tmp_path / "worker")
    assert done.stdout == b"ran\n", done.stderr.decode()


def test_an_unwritable_pvc_is_a_storage_error(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.bin").write_bytes(random.Random(1).randbytes(900_000))
    spec = specification(in_a_bucket(folder, tmp_path), claims={str(tmp_path): "work"})
    (tmp_path / "work").touch()
    with pytest.raises(StorageError, match=r"^cannot write to .*: Not a directory; "):
        bring(spec, tmp_path / "work")


def test_code_on_a_claim_is_read_by_the_workers_from_there(folder: Path, tmp_path: Path) -> None:
    inputs = as_folder(folder, "train.py", upload=f"{tmp_path}/claim")
    assert "is not on a PVC that the workers mount" in refused(specification(inputs))
    spec = specification(inputs, claims={str(tmp_path): "work"})
    assert bring(spec, None) == spec
    Path(inputs["code"]).unlink()
    assert bring(spec, None) == spec  # the step may not mount it, and workers hold it to its digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "not found: upload it with as_folder"),
        (lambda file: file.write_bytes(b"else"), "..., not the one of its name: upload it again"),
        (lambda file: file.write_bytes(b""), "..., not the one of its name: upload it again"),
    ],
    ids=["missing", "changed", "empty"],
)
def test_other_code_is_refused(folder: Path, tmp_path: Path, change: Any, message: str) -> None:
    uploaded = in_a_bucket(folder, tmp_path)
    change(Path(uploaded["code"].removeprefix("file://")))
    assert refused(specification(uploaded)).endswith(message)


def test_an_invalid_entry_or_value_is_refused(folder: Path, tmp_path: Path) -> None:
    good = as_folder(folder, "train.py")
    wrong = {**good, "entry": "trian.py"}
    assert "entry='trian.py' is not in the folder of code, which has train.py" in refused(
        specification(wrong)
    )
    uploaded = {**in_a_bucket(folder, tmp_path), "entry": "trian.py"}
    assert "entry='trian.py' is not in the folder of code" in refused(specification(uploaded))
    for cut in (good["code"][:-1], good["code"][:-8]):
        line = refused(specification({**good, "code": cut}))
        assert "make it with" in line
        assert good["code"][60:] not in line


def printed(*settings: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(output("manifest", "pytorchjob", "image=a:1", *settings)))


def test_a_script_is_printed_as_it_is_in_lines() -> None:
    chance = random.Random(14)
    letters = "ab \n\n\t:#-'\"\\{}%$&*|>ü∑\u2028\ufeff\x85\x7f\r"
    for _ in range(40):
        script = "x" + "".join(chance.choices(letters, k=chance.randint(0, 20)))
        brought, _ = printed(f"script={script}")
        assert brought["data"] == {"script.py": script}
    text = output("manifest", "pytorchjob", "image=a:1", "script=import os\nos.sync()")
    assert "  script.py: |-\n    import os\n    os.sync()\n" in text


def test_a_folder_is_printed_as_its_archive(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    brought, job = printed(f"code={tmp_path}", "entry=train.py", "packages_to_install=[a==1]")
    assert brought["data"].keys() == {"start.py", "requirements.txt", "uv.lock"}
    archive = base64.b64decode(brought["binaryData"]["code.tar.gz"])
    assert archive == code.archive_of(tmp_path)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["command"][:3] == ["python3", "/etc/kfp-ddp/start.py", "alone"]
    error = call("manifest", "pytorchjob", "image=a:1", f"code={tmp_path}", "entry=b.py").exception
    assert "entry='b.py' is not in the folder of code" in str(error)


COMMAND = ["image=a:1", "command=[python3, train.py]", "nodes=2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pytorchjob", "nodes=2"], "image is missing"),
        (["trainjob", *COMMAND, "--run-id", "no such id"], "cannot be a label"),
        (["trainjob", *COMMAND, "env={A: ["], "is not a YAML value"),
        (["trainjob", *COMMAND, "nodes"], "is not a setting; write SETTING=VALUE"),
        (["tfjob", *COMMAND, "kind=mpijob"], "settings sets kind, which is the first argument"),
    ],
)
def test_invalid_settings_fail_with_one_line(arguments: list[str], message: str) -> None:
    answer = call("manifest", *arguments)
    assert isinstance(answer.exception, InputError)
    assert message in str(answer.exception)
    assert answer.output == ""


def from_inputs(**fields: Any) -> LaunchSpec:
    """Return the specification of inputs and further settings."""
    settings = {name: value for name, value in fields.items() if name not in INPUTS}
    inputs = {**INPUTS, **{name: fields[name] for name in fields.keys() & INPUTS.keys()}}
    return engine.specification(settings, dsl.TaskConfig(), **inputs)


def test_inputs_are_settings_with_their_defaults_and_descriptions() -> None:
    assert from_inputs() == LaunchSpec.create(image="a:1")
    assert len(PARAMETERS) <= 16
    for name in INPUTS:
        assert job.component_spec.inputs[name].description == FIELDS[name].description


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
    assert from_inputs(script="x", args=packed_words).args == tuple(hard)
    with pytest.raises(InputError, match="is not a packed word"):
        from_inputs(script="x", args=[WORD + "!"])


def test_all_inputs_of_the_component_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    named = inspect.signature(engine.run).parameters.keys()
    reached: dict[str, Any] = {}
    monkeypatch.setattr(engine, "run", lambda **fields: str(reached.update(fields)))
    fields = {name: object() for name in PARAMETERS}
    job.python_func(**fields)
    assert reached == fields
    assert fields.keys() - named == INPUTS.keys()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
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


def test_a_manifest_takes_a_folder_that_is_packed_already(folder: Path) -> None:
    (folder / "data").write_bytes(random.Random(7).randbytes(5000))  # no path is as long
    inputs = as_folder(folder, "train.py")
    assert printed("entry=train.py", f"code={inputs['code']}")
