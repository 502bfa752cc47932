import json
import os
from pathlib import Path

import pytest
from click.testing import Result

from kfp_ddp.core.config import FIELDS, FREE, chosen, resolved, untrusted
from kfp_ddp.training.model.torchvision_weights import cached
from tests.commands import call, output, refused
from tests.files import write


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files of the folder and of the person, neither there yet."""
    for name, field in FIELDS.items():
        monkeypatch.delenv(f"KFP_DDP_{name.upper()}", raising=False)
        monkeypatch.delenv(field.metadata.get("variable", "KFP_DDP_NONE"), raising=False)
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    (home / "kfp-ddp").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return {"here": here / "kfp-ddp.yaml", "home": home / "kfp-ddp" / "config.yaml"}


def show(*words: str) -> Result:
    return call("config", "show", *words)


def test_init_writes_settings_once(files: dict[str, Path]) -> None:
    words = ["init", "--host", "https://kfp.example.com", "--registry", "registry.example.com/ml"]
    output(*words)  # trusts what it writes
    expected = {"registry": "registry.example.com/ml", "destination": ""}
    assert chosen("registry", "destination") == expected
    text = files["here"].read_text()
    refused(*words)
    assert files["here"].read_text() == text


def test_precedence_of_origins(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files["home"].write_text("host: http://home\nexperiment: home\nnamespace: home\nui: home\n")
    files["here"].write_text("host: http://here\nexperiment: here\nnamespace: here\n")
    monkeypatch.setenv("KFP_DDP_HOST", "http://variable")
    monkeypatch.setenv("KFP_DDP_EXPERIMENT", "variable")
    values = {n: o.value for n, o in resolved({"host": "http://flag", "experiment": None}).items()}
    expected = {"host": "http://flag", "experiment": "variable", "namespace": "here", "ui": "home"}
    assert values.items() >= {**expected, "kfp_namespace": "kubeflow"}.items()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://kfp")  # a variable of kfp itself
    assert resolved()["host"].value == "http://variable"
    monkeypatch.delenv("KFP_DDP_HOST")
    assert resolved()["host"].value == "http://kfp"


def test_a_user_without_a_home_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of a pod: no user has this number
    assert resolved()["registry"].value == FIELDS["registry"].default
    assert not cached("weights.pth").is_file()


def test_show_names_the_origins(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files["here"].write_text("port_forward: true\n")
    monkeypatch.setenv("KFP_DDP_TIMEOUT", "5")
    lines = {line.split()[0]: line for line in show("--origin").stdout.splitlines()}
    assert lines["port_forward"].split()[1:] == ["true", "(kfp-ddp.yaml)"]
    assert lines["timeout"].split()[1:] == ["5.0", "(KFP_DDP_TIMEOUT)"]
    assert lines["kfp_namespace"].split()[1:] == ["kubeflow", "(default)"]
    assert len({line.index("(") for line in lines.values()}) == 1, "in a column of their own"
    assert json.loads(show("--json").stdout)["timeout"] == {
        "value": 5.0,
        "origin": "KFP_DDP_TIMEOUT",
    }


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_the_file_of_a_folder_chooses_only_what_sends_nothing_elsewhere(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value = {"port_forward": "true", "timeout": "7.0"}.get(name, "theirs")
    files["here"].write_text(f"{name}: {value}\n")
    assert bool(untrusted([name])) == (name not in FREE)
    assert bool(untrusted(FIELDS)) == (name not in FREE)
    assert not untrusted(FIELDS.keys() - {name})
    files["home"].write_text(f"{name}: {value}\n")
    assert not untrusted([name]), "the user's own settings have this value"
    files["home"].write_text("")
    monkeypatch.setenv(f"KFP_DDP_{name.upper()}", "false" if name == "port_forward" else "9")
    assert not untrusted([name]), "the file has no effect"


def test_a_folder_is_trusted_until_its_file_changes(files: dict[str, Path], tmp_path: Path) -> None:
    files["here"].write_text(f"model_registry: http://x\ndestination: {tmp_path}\nhost: http://x\n")
    assert "kfp-ddp config trust" in refused("rollback", "flowers")
    assert "kfp-ddp config trust" in refused("runs")
    assert "contains no run" in refused("describe", ".")  # sends nothing
    output("config", "trust")
    assert "there is no model" in refused("rollback", "flowers")
    files["here"].write_text(f"model_registry: http://y\ndestination: {tmp_path}\n")
    assert "kfp-ddp config trust" in refused("rollback", "flowers")
    output("config", "trust")
    os.chdir(write(tmp_path / "other/kfp-ddp.yaml", files["here"].read_bytes()).parent)
    # Another folder with an equal file.
    assert "kfp-ddp config trust" in refused("rollback", "flowers")


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
        ("hots: http://x\n", "kfp-ddp.yaml: there is no setting 'hots'; did you mean 'host'?"),
        ("timeout: soon\n", "kfp-ddp.yaml: timeout='soon' should be a number"),
        ("timeout: 0\n", "kfp-ddp.yaml: timeout=0 should be more than 0"),
        ("host: [a]\n", "kfp-ddp.yaml: host=['a'] should be text"),
        (ALIASES, "kfp-ddp.yaml: host=[["),
        ("#" * 2_000_000, "kfp-ddp.yaml has more than 1,048,576 bytes"),
        ("- a\n", "kfp-ddp.yaml needs lines such as host: https://kubeflow.example.com"),
        ("a: b: c\n", "kfp-ddp.yaml is not YAML: mapping values are not allowed"),
    ],
)
def test_a_file_that_cannot_be_used(files: dict[str, Path], text: str, told: str) -> None:
    files["here"].write_text(text)
    line = str(show().exception)
    assert told in line[:200]
    assert "\n" not in line
    assert len(line) < 5000


def test_a_pipe_is_not_waited_for(files: dict[str, Path]) -> None:
    os.mkfifo(files["here"])
    assert str(show().exception) == "cannot read kfp-ddp.yaml: not a plain file"
