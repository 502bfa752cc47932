"""`kfp-ddp manifest`: what it prints comes back as it is, with the code that a job brings."""

import base64
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kfp_ddp.cli.jobs import manifest as command
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs import code


def printed(*settings: str) -> list[dict[str, Any]]:
    answer = CliRunner().invoke(command, ["pytorchjob", "image=a:1", *settings])
    if answer.exception is not None:
        raise answer.exception
    return list(yaml.safe_load_all(answer.output))


def test_a_script_by_chance_is_printed_as_it_is() -> None:
    chance = random.Random(14)
    letters = "ab \n\n\t:#-'\"\\{}%$&*|>ü∑\u2028\ufeff\x85\x7f\r"
    for _ in range(40):
        script = "x" + "".join(chance.choices(letters, k=chance.randint(0, 20)))
        brought, _ = printed(f"script={script}")
        assert brought["data"] == {"script.py": script}


def test_lines_are_printed_as_lines() -> None:
    answer = CliRunner().invoke(command, ["pytorchjob", "image=a:1", "script=import os\nos.sync()"])
    assert "  script.py: |-\n    import os\n    os.sync()\n" in answer.output


def test_a_folder_is_printed_as_its_archive(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    brought, job = printed(f"code={tmp_path}", "entry=train.py", "packages_to_install=[a==1]")
    assert brought["data"].keys() == {"start.py", "requirements.txt"}
    archive = base64.b64decode(brought["binaryData"]["code.tar.gz"])
    assert archive == code.archive_of(tmp_path)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["command"][:3] == ["python3", "/etc/kfp-ddp/start.py", "alone"]
    with pytest.raises(InputError, match=r"entry='b.py' is not in the folder of code"):
        printed(f"code={tmp_path}", "entry=b.py")


COMMAND = ["image=a:1", "command=[python3, train.py]", "nodes=2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pytorchjob", "nodes=2"], "image is missing"),
        (["trainjob", *COMMAND, "--task-name", "no such name"], "cannot be a label"),
        (["trainjob", *COMMAND, "env={A: ["], "is not a YAML value"),
        (["trainjob", *COMMAND, "nodes"], "is not a setting; write SETTING=VALUE"),
        (["tfjob", *COMMAND, "kind=mpijob"], "settings sets kind, which is the first argument"),
    ],
)
def test_invalid_settings_fail_with_one_line(arguments: list[str], says: str) -> None:
    answer = CliRunner().invoke(command, arguments)
    assert isinstance(answer.exception, InputError)
    assert says in str(answer.exception)
    assert "\n" not in str(answer.exception)
    assert answer.output == ""
