"""The commands of the pages run, in their order, against a KFP server."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kfp_ddp.cli import app
from tests import photographs
from tests.kfp_server.server import KfpServer
from tests.pages import ROOT, SETTINGS_FILE, of_ours, typed

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("cluster", "laptop", "nightly", "release")))
# The test of each command that needs a cluster, a bucket, minutes or a person.
ELSEWHERE = {
    "compile": "tests/unit/test_compile.py",
    "install": "tests/e2e/test_install.py",
    "doctor": "tests/e2e/test_scenarios_doctor.py",
    "demo": "tests/integration/test_pipeline.py",
    "predict": "tests/integration/test_run_local.py",
    "compare": "tests/unit/test_client_compare.py",
    "describe": "tests/unit/test_client_describe.py",
    "logs": "tests/e2e/test_client_inspect.py",
    "download": "tests/unit/test_client_compare.py",
    "models": "tests/integration/test_client_models.py",
    "promote": "tests/integration/test_client_models.py",
    "retry": "tests/integration/test_client_runs.py",
    "rollback": "tests/integration/test_client_models.py",
    "serve": "tests/integration/test_serve.py",
    "tensorboard": "tests/integration/test_tensorboard_command.py",
    "verify": "tests/integration/test_verify_command.py",
}
FOLLOWS = ("--follow", "--watch")
"""Options that wait for the end of a run."""


@pytest.fixture
def scene(tmp_path: Path, kfp_server: KfpServer, monkeypatch: pytest.MonkeyPatch) -> KfpServer:
    """Compiled pipelines, photographs, settings, and a server with a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KFP_DDP_HOST", kfp_server.url)
    monkeypatch.setenv("KFP_DDP_REGISTRY", "registry.example.com/ml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    photographs.write(tmp_path / "photos", 2)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "compiled").symlink_to(ROOT / "compiled")
    (tmp_path / "compiled").symlink_to(ROOT / "compiled")
    for page in PAGES:
        for name, settings in SETTINGS_FILE.findall((ROOT / page).read_text()):
            (tmp_path / name).write_text(settings)
    return kfp_server


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_succeed(page: str, scene: KfpServer) -> None:
    ours = [words for words in filter(None, map(of_ours, typed(ROOT / page))) if here(words)]
    assert ours
    for words in ours:
        arguments = [word for word in words if word not in FOLLOWS]
        answer = CliRunner().invoke(app, arguments)
        message = f"kfp-ddp {' '.join(arguments)}: {answer.output}{answer.exception}"
        assert answer.exit_code == 0, message


def here(words: list[str]) -> bool:
    """Return whether a command needs no cluster, bucket or minutes."""
    of_a_bucket = words[0] == "sync" and words[1].startswith("gs:")
    return words[0] not in ELSEWHERE and "--local" not in words and not of_a_bucket


def test_other_tests_exist() -> None:
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).exists()] == []
