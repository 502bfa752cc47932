"""Which tests on a cluster the changes of the last day reach, and how many are smoke tests."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed
from tests.changed import E2E, ROOT, select

HOUR = 60 * 60
NOW = 1_800_000_000


def git(folder: Path, *words: str, hours_ago: float = 0) -> None:
    """Run git, with a committer's date before NOW."""
    date = f"{NOW - int(hours_ago * HOUR)} +0000"
    who = {
        f"GIT_{role}_{name}": "a@b"
        for role in ("AUTHOR", "COMMITTER")
        for name in ("NAME", "EMAIL")
    }
    environment = {**who, "GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "HOME": str(folder)}
    environment["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    subprocess.run(["git", "-C", folder, *words], check=True, env=environment, capture_output=True)


def commit(folder: Path, name: str, hours_ago: float) -> None:
    (folder / name).write_text(name)
    git(folder, "add", "--all")
    git(folder, "commit", "--message", name, hours_ago=hours_ago)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose HEAD merged, an hour ago, a branch that is two days old."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--initial-branch", "main")
    commit(folder, "first", 72)
    git(folder, "switch", "--create", "branch")
    commit(folder, "of a branch", 48)
    git(folder, "switch", "main")
    commit(folder, "old", 30)
    commit(folder, "new", 2)
    git(folder, "merge", "--no-ff", "branch", hours_ago=1)
    monkeypatch.setattr(changed, "ROOT", folder)
    return folder


def test_the_last_day_ends_with_head(checkout: Path) -> None:
    assert changed.changed() == ["new", "of a branch"]
    commit(checkout, "later", -30)
    assert changed.changed() == ["later"]


def test_without_its_history_everything_may_have_changed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", f"file://{checkout}", str(shallow))
    for folder in (shallow, tmp_path):
        monkeypatch.setattr(changed, "ROOT", folder)
        assert changed.changed() is None


ALL = select(None)


@pytest.mark.parametrize(
    ("path", "first", "not_reached"),
    [
        (f"{E2E}/test_servers.py", "test_servers", "test_pulls"),
        (f"{E2E}/harness/kserve.py", "test_deploy_step", "test_launch_jobs"),
        ("kfp_ddp/rollout/rollout.py", "test_deploy_step", "test_launch_jobs"),
        ("kfp_ddp/datasets/volume/publish.py", "test_dataset_volume_cluster", "test_launch_jobs"),
        ("kfp_ddp/jobs/run.py", "test_launch_manifests", "test_client_files"),
        ("training/trainer.py", "test_launch_train_step", "test_client_files"),  # run by pods
        ("kfp_ddp/cli/cluster.py", "test_client_port_forward", "test_launch_jobs"),
        ("compiled/sweep.yaml", "test_pipeline_jobs", "test_launch_jobs"),
        ("examples/own_script.py", "test_pipelines", "test_launch_jobs"),
    ],
)
def test_a_change_reaches_what_imports_or_runs_it(path: str, first: str, not_reached: str) -> None:
    assert (ROOT / path).is_file()
    reached = [Path(test).stem for test in select([path])]
    assert reached.index(first) < 3
    assert not_reached not in reached


@pytest.mark.parametrize(
    "path", ["requirements.lock", "kfp_ddp/__init__.py", f"{E2E}/conftest.py", "no/such/room.py"]
)
def test_what_cannot_be_placed_reaches_every_test(path: str) -> None:
    assert sorted(select([path])) == ALL


def test_what_no_test_on_a_cluster_reads_reaches_none() -> None:
    assert select(["docs/operate.md", "README.md", "tests/unit/core/test_step.py"]) == []
    assert select([]) == []


def test_a_test_that_imports_more_of_what_changed_is_nearer() -> None:
    one, other = f"{E2E}/test_servers.py", f"{E2E}/test_deploy_step.py"
    assert select([one, other, "kfp_ddp/rollout/rollout.py"])[:2] == [other, one]


@pytest.mark.slow  # it collects
def test_a_test_that_is_not_begun_in_time_is_named() -> None:
    command = [sys.executable, "-m", "pytest", f"{E2E}/test_servers.py"]
    environment = {**os.environ, "KUBECONFIG": "", "KFP_DDP_TEST_MINUTES": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_servers.py: not begun within 0 minutes" in done.stdout


def test_every_change_waits_for_at_most_25_smoke_tests() -> None:
    """Functions; a mark on a whole file would not be counted."""
    marks = []
    for test in sorted((ROOT / E2E).glob("test_*.py")):
        tree = ast.parse(test.read_text())
        marks += [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "smoke"
        ]
        assert "pytestmark = pytest.mark.smoke" not in test.read_text()
    assert 0 < len(marks) <= 25
