import json
import os
from pathlib import Path

import pytest
from click.testing import Result

from kfp_ddp.core.config import FIELDS, chosen, resolved
from kfp_ddp.training.spec.torchvision_weights import cached
from tests.commands import call, refused
from tests.files import write


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which does not exist yet; the current folder is another one."""
    for name, field in FIELDS.items():
        monkeypatch.delenv(f"KFP_DDP_{name.upper()}", raising=False)
        monkeypatch.delenv(field.metadata.get("variable", "KFP_DDP_NONE"), raising=False)
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    (home / "kfp-ddp").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home / "kfp-ddp" / "config.yaml"


def show(*words: str) -> Result:
    return call("config", "show", *words)


def test_precedence_of_origins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("host: http://home\nexperiment: home\nui: home\n")
    monkeypatch.setenv("KFP_DDP_HOST", "http://variable")
    monkeypatch.setenv("KFP_DDP_EXPERIMENT", "variable")
    values = {n: o.value for n, o in resolved({"host": "http://flag", "experiment": None}).items()}
    expected = {"host": "http://flag", "experiment": "variable", "ui": "home"}
    assert values.items() >= {**expected, "kfp_namespace": "kubeflow"}.items()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://kfp")  # a variable of kfp itself
    assert resolved()["host"].value == "http://variable"
    monkeypatch.delenv("KFP_DDP_HOST")
    assert resolved()["host"].value == "http://kfp"


def test_a_variable_names_another_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("host: http://home\nui: home\n")
    other = write(file.with_name("other.yaml"), "host: http://other\n")
    monkeypatch.setenv("KFP_DDP_CONFIG", str(other))
    assert chosen("host", "ui") == {"host": "http://other", "ui": ""}
    assert resolved()["host"].origin == str(other)
    other.unlink()
    assert "KFP_DDP_CONFIG names" in refused("config", "show")


@pytest.mark.parametrize("config_home", ["", ".", "~"])
def test_no_file_of_the_current_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_home: str
) -> None:
    places = ("", "kfp-ddp/", "~/.config/kfp-ddp/", "~/kfp-ddp/", ".config/kfp-ddp/")
    for place in places:
        for name in ("kfp-ddp.yaml", "config.yaml"):
            write(tmp_path / "here" / place / name, "host: http://theirs\ndestination: theirs\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", config_home)
    for home in ("", ".", "~", None):
        if home is None:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of a pod: without an entry
        else:
            monkeypatch.setenv("HOME", home)
        assert {one.origin for one in resolved().values()} == {"default"}


def test_a_file_that_0_1_0_read_is_named(file: Path) -> None:
    Path("kfp-ddp.yaml").write_text("host: http://theirs\n")
    words = ("models", "--destination", "nowhere")
    assert str(file) in call(*words).stderr
    Path("kfp-ddp.yaml").unlink()
    assert str(file) not in call(*words).stderr


def test_a_user_without_a_home_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of a pod: no user has this number
    assert resolved()["registry"].value == FIELDS["registry"].default
    assert not cached("weights.pth").is_file()


def test_show_names_the_origins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port_forward: true\n")
    monkeypatch.setenv("KFP_DDP_TIMEOUT", "5")
    lines = {line.split()[0]: line for line in show("--origin").stdout.splitlines()}
    assert lines["port_forward"].split()[1:] == ["true", f"({file})"]
    assert lines["timeout"].split()[1:] == ["5.0", "(KFP_DDP_TIMEOUT)"]
    assert lines["kfp_namespace"].split()[1:] == ["kubeflow", "(default)"]
    assert len({line.index("(") for line in lines.values()}) == 1, "in a column of their own"
    assert json.loads(show("--json").stdout)["timeout"] == {
        "value": 5.0,
        "origin": "KFP_DDP_TIMEOUT",
    }


def test_show_prints_no_secret_and_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "COOKIE", "PASSWORD"):
        monkeypatch.setenv(f"KFP_DDP_{name}", "hunter2")
    assert "hunter2" not in show("--origin").stdout + show("--json").stdout
    for name in ("DESTINATION", "PIP_INDEX_URL", "REGISTRY", "UI", "PIPELINE_ROOT"):
        with monkeypatch.context() as variables:
            variables.setenv(f"KFP_DDP_{name}", "https://me:hunter2/3@h")
            line = str(show().exception)
        assert (f"KFP_DDP_{name}: {name.lower()} is" in line, "hunter2" in line) == (True, False)
    monkeypatch.setenv("KFP_DDP_TIMEOUT", "soon")
    assert str(show().exception) == "KFP_DDP_TIMEOUT: timeout='soon' should be a number"


ALIASES = "host:\n- &a0 [x, x, x, x, x, x, x]\n" + "".join(
    f"- &a{one} [{', '.join([f'*a{one - 1}'] * 7)}]\n" for one in range(1, 5)
)
"""Some bytes that are long when each alias is written."""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hots: http://x\n", "config.yaml: there is no setting 'hots'; did you mean 'host'?"),
        ("timeout: soon\n", "config.yaml: timeout='soon' should be a number"),
        ("timeout: 0\n", "config.yaml: timeout=0 should be more than 0"),
        ("host: [a]\n", "config.yaml: host=['a'] should be text"),
        (ALIASES, "config.yaml: host=[["),
        ("#" * 2_000_000, "config.yaml has more than 1,048,576 bytes"),
        ("- a\n", "config.yaml needs lines such as host: https://kubeflow.example.com"),
        ("a: b: c\n", "config.yaml is not YAML: mapping values are not allowed"),
    ],
)
def test_a_file_that_cannot_be_used(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    line = str(show().exception)
    assert told in line
    assert "\n" not in line
    assert len(line) < 5000


def test_a_pipe_is_not_waited_for(file: Path) -> None:
    os.mkfifo(file)
    assert str(show().exception) == f"cannot read {file}: not a plain file"
