import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kfp_ddp.cli import app
from kfp_ddp.core.config import FIELDS, config, untrusted
from kfp_ddp.core.errors import InputError, ServerError
from kfp_ddp.training.model.torchvision_weights import cached


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
    return CliRunner().invoke(app, ["config", "show", *words])


def test_init_writes_settings_once(files: dict[str, Path]) -> None:
    words = ["init", "--host", "https://kfp.example.com", "--registry", "registry.example.com/ml"]
    done = CliRunner().invoke(app, words)
    assert "your own settings do not name this host" in done.stderr
    assert config().registry == "registry.example.com/ml"
    assert config().destination == ""
    text = files["here"].read_text()
    assert isinstance(CliRunner().invoke(app, words).exception, InputError)
    assert files["here"].read_text() == text


def test_a_flag_goes_before_a_variable_before_a_file_before_a_default(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files["home"].write_text("host: http://home\nexperiment: home\nnamespace: home\nui: home\n")
    files["here"].write_text("host: http://here\nexperiment: here\nnamespace: here\n")
    monkeypatch.setenv("KFP_DDP_HOST", "http://variable")
    monkeypatch.setenv("KFP_DDP_EXPERIMENT", "variable")
    found = config({"host": "http://flag", "experiment": None})
    assert (found.host, found.experiment) == ("http://flag", "variable")
    assert (found.namespace, found.ui, found.kfp_namespace) == ("here", "home", "kubeflow")


def test_a_user_without_a_home_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # of a pod: no user has this number
    assert config().registry == FIELDS["registry"].default
    assert not cached("weights.pth").is_file()


def test_the_variables_of_kfp_itself_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://kfp")
    assert config().host == "http://kfp"
    monkeypatch.setenv("KFP_DDP_HOST", "http://ours")
    assert config().host == "http://ours"


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


@pytest.mark.parametrize(
    ("own", "trusted"),
    [
        ({}, False),
        ({"home": "host: http://other\n"}, False),
        ({"home": "host: http://127.0.0.1:1/\n"}, True),
        ({"variable": "http://127.0.0.1:1"}, True),
        ({"flag": "http://127.0.0.1:1"}, True),
    ],
)
@pytest.mark.parametrize("line", ["host: http://127.0.0.1:1", "token_file: secret", "context: x"])
def test_the_file_of_a_folder_chooses_no_host_or_login_that_the_user_does_not_name(
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, str],
    trusted: bool,
    line: str,
) -> None:
    files["here"].write_text(f"{line}\n")
    Path("secret").write_text("a line of a file of the user")
    files["home"].write_text(own.get("home", ""))
    if "variable" in own:
        monkeypatch.setenv("KFP_DDP_HOST", own["variable"])
    flags = ["--host", own["flag"]] if "flag" in own else []
    error = CliRunner().invoke(app, ["runs", *flags]).exception
    if trusted:
        assert isinstance(error, ServerError)  # the server does not answer
    elif line.startswith("host") or not own:
        assert isinstance(error, InputError)
        assert "kfp-ddp.yaml of this folder sets" in str(error)
    here = CliRunner().invoke(app, ["describe", ".", *flags]).exception  # sends nothing
    assert "contains no run" in str(here)


@pytest.mark.parametrize(
    ("here", "home", "named"),
    [
        ("port_forward: true\nkfp_namespace: x", "host: http://own", "kfp_namespace, port_forward"),
        ("kfp_namespace: x", "port_forward: true\nhost: http://own", "kfp_namespace"),
        ("kfp_namespace: x", "", "kfp_namespace"),
        ("kfp_namespace: x", "host: http://own", ""),
        ("port_forward: true\ncontext: x", "port_forward: true\ncontext: x", ""),
        ("kfp_namespace: kubeflow", "", ""),
    ],
)
def test_the_file_of_a_folder_chooses_no_cluster(
    files: dict[str, Path], here: str, home: str, named: str
) -> None:
    files["here"].write_text(here)
    files["home"].write_text(home)
    message = untrusted("host")
    assert (f"sets {named}, which" in message) if named else not message


def test_the_file_of_a_folder_chooses_no_registry(files: dict[str, Path], tmp_path: Path) -> None:
    files["here"].write_text(f"model_registry: http://x\ndestination: {tmp_path}\n")
    error = CliRunner().invoke(app, ["rollback", "flowers"]).exception
    assert "your own settings do not name this model_registry" in str(error)
    files["home"].write_text("model_registry: http://x\n")
    assert "there is no model" in str(CliRunner().invoke(app, ["rollback", "flowers"]).exception)


def test_show_prints_no_secret_and_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "COOKIE", "PASSWORD"):
        monkeypatch.setenv(f"KFP_DDP_{name}", "hunter2")
    assert "hunter2" not in show("--origin").stdout + show("--json").stdout
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
        ("token: abc\n", "kfp-ddp.yaml: there is no setting 'token'; did you mean 'token_file'?"),
        ("timeout: soon\n", "kfp-ddp.yaml: timeout='soon' should be a number"),
        ("timeout: 0\n", "kfp-ddp.yaml: timeout=0 should be more than 0"),
        ("port_forward: maybe\n", "kfp-ddp.yaml: port_forward='maybe' should be true or false"),
        ("host: [a]\n", "kfp-ddp.yaml: host=['a'] should be text"),
        (ALIASES, "kfp-ddp.yaml: host=[["),
        ("#" * 2_000_000, "kfp-ddp.yaml has more than 1,048,576 bytes"),
        ("- a\n", "kfp-ddp.yaml needs lines such as host: https://kubeflow.example.com"),
        ("a: b: c\n", "kfp-ddp.yaml is not YAML: mapping values are not allowed here"),
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
