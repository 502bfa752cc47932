import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kfp_ddp.cli import COMMANDS, app
from kfp_ddp.core import machine
from kfp_ddp.core.container_images import Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.plan.form import SUBJECTS
from kfp_ddp.storage.kinds import open_store
from tests import run_output
from tests.commands import call, output, refused
from tests.kfp_server import faults
from tests.kfp_server.server import KfpServer
from tests.waiting import until

HEAVY = ("google", "kfp", "kubernetes", "pydantic", "torch", "yaml")
RARE = ("ctypes", "email", "importlib.metadata", "shutil", "tarfile", "tempfile", "urllib.request")


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from kfp_ddp.cli import main; sys.argv = ['kfp-ddp', '--help']\n"
        "try: main()\n"
        f"finally: print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert all(name in done.stdout for name in COMMANDS)
    assert "\n  143  the run was cancelled\n" in done.stdout


def test_output_is_utf_8_in_any_code_page() -> None:
    words, text = [sys.executable, "-m", "kfp_ddp", "config", "show"], "Bäume ✓"
    names = {"PYTHONIOENCODING": "cp1252", "KFP_DDP_EXPERIMENT": text}
    done = subprocess.run(words, env=os.environ | names, capture_output=True, check=True)
    assert text in done.stdout.decode()


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        ("kfp_ddp.cli.sync, kfp_ddp.datasets.sync, kfp_ddp.storage.gcs", HEAVY + RARE),
        (
            "kfp_ddp.client.run.description, kfp_ddp.client.run.comparison, "
            "kfp_ddp.client.run.download, kfp_ddp.client.run.logs",
            ("PIL", "numpy", "onnx", "psutil", "torch"),
        ),
    ],
)
def test_a_command_imports_only_its_own(imported: str, unwanted: tuple[str, ...]) -> None:
    probe = f"import sys, {imported}\nprint(sorted({{*{unwanted!r}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "spelt"),
    [
        ("compile", {"--output", "-o", "--directory"}),
        ("run", {"--gpus", "--gpus-per-node"}),
        ("status", {"--follow", "--watch"}),
    ],
)
def test_an_option_is_spelt_as_in_other_commands_and_as_it_was(name: str, spelt: set[str]) -> None:
    command = app.get_command(click.Context(app), name)
    assert command is not None
    assert spelt in [{*one.opts} for one in command.params]


def test_settings_of_a_run_are_listed_with_their_defaults() -> None:
    listed = json.loads(output("settings", "--json"))
    rows = {(row["mapping"], row["name"]): row for row in listed}
    job = {name for mapping, name in rows if mapping == "job"}
    assert job >= set(LaunchSpec.model_fields) - {"nodes", "gpus_per_node"}
    boxes = {name: row["default"] for (mapping, name), row in rows.items() if not mapping}
    assert (boxes["recipe"], boxes["epochs"], boxes["pretrained"]) == ("auto", "0", "auto")
    assert "epochs" not in {name for mapping, name in rows if mapping == "training"}
    assert rows["job", "shm_size"]["default"] == "2Gi"
    assert rows["job", "spot"]["choices"] == "One of '', gke, aks, karpenter, eks."
    assert ("", "source") in rows
    assert "learning_rate=0.1" in output("settings", "lr")
    assert "did you mean 'epochs'?" in refused("settings", "epocsh")
    assert "did you mean 'sweep'?" in refused("settings", "sweeep")
    for mapping in SUBJECTS:
        of_group = [row for row in listed if row["mapping"] == mapping]
        found = json.loads(output("settings", mapping, "--json"))
        assert all(row in found for row in of_group)


@pytest.mark.parametrize(
    "registry",
    [
        *("https://registry.example.com/ml/", "http://localhost:5000", "host//x", "host/x//"),
        *("Host/x", "host:port/x", "host/x:1.0", "/x", "host/-x", "-host/x", "host/x y"),
    ],
)
def test_a_registry_that_no_image_could_come_from_is_refused(registry: str, tmp_path: Path) -> None:
    arguments = ["compile", "--registry", registry, "--directory", str(tmp_path)]
    assert refused(*arguments).endswith("give host/path in lower case, without a scheme")
    assert list(tmp_path.iterdir()) == []
    for valid in ("localhost:5000/a", "10.0.0.1:5000", "e.com/a_b/c-d/e__f.g/", "a-b.dev/p/r"):
        Images.create({"registry": valid})


@pytest.mark.parametrize(("word", "meant"), [("predic", "predict"), ("train", "run")])
def test_a_command_that_is_misspelt_or_called_otherwise_is_suggested(word: str, meant: str) -> None:
    answer = call(word)
    assert answer.exit_code == 2
    assert f"No such command '{word}'. Did you mean '{meant}'?" in answer.output


@pytest.mark.parametrize("words", [["predict", "bundle", "a.jpg"], ["serve", "bundle"], []])
def test_windows_is_refused_in_one_line(words: list[str]) -> None:
    blocked = "import sys; sys.modules.update(fcntl=None, resource=None)"
    ask = "from kfp_ddp.cli import main; main()" if words else "from kfp_ddp.predict import load"
    program = [sys.executable, "-c", f"{blocked}; {ask}", *words]
    done = subprocess.run(program, capture_output=True, text=True)
    assert "WSL" in done.stderr.splitlines()[-1]
    assert "During handling" not in done.stderr
    if words:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_missing_library_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kfp_ddp.storage.azure", raising=False)
    monkeypatch.setitem(sys.modules, "azure.core", None)
    with pytest.raises(InputError, match=r"needs azure.core, .*'kfp-ddp\[azure\]'"):
        open_store("az://bucket/models")


@pytest.mark.parametrize("words", [["demo"], ["run", "photos", "--local"]])
def test_missing_extra(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: None if name == "psutil" else name)
    assert "needs psutil, which is not installed: pip install 'kfp-ddp[" in refused(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_without_its_scheme_is_no_folder_to_sync(tmp_path: Path) -> None:
    assert "write gs://bucket/flowers" in refused("sync", "gs:/bucket/flowers", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_command_ends_with_130_and_a_word(kfp_server: KfpServer) -> None:
    kfp_server.fail("*", faults.silence)
    words = ["upload", "train_resnet", "--host", kfp_server.url, "--registry", "example.com/ml"]
    program = [sys.executable, "-m", "kfp_ddp", *words]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as command:
        until(lambda: kfp_server.requests or command.poll() is not None)
        command.send_signal(signal.SIGINT)
        _, stderr = command.communicate(timeout=30)
    assert (command.returncode, stderr.strip()) == (130, "interrupted")


@pytest.mark.parametrize("words", [["report", "{run}"], ["models", "{name}", "--destination", "."]])
def test_a_name_does_not_move_the_cursor_of_a_terminal(words: list[str], tmp_path: Path) -> None:
    name = "\x1b[2Jcleared"
    run = run_output.make(tmp_path / name)
    reader, terminal = pty.openpty()
    arguments = [word.format(run=run, name=name) for word in words]
    command = [sys.executable, "-m", "kfp_ddp", *arguments]
    subprocess.run(command, stdout=terminal, stderr=terminal, cwd=tmp_path, check=False)
    os.close(terminal)
    with open(reader, "rb") as screen:
        text = screen.read1(1 << 16)
    assert b"\\x1b[2Jcleared" in text
    assert b"\x1b" not in text
