"""Working files outside of a pod: a folder of this user alone, which is removed at the end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kfp_ddp.core import folders
from kfp_ddp.core.errors import StorageError
from kfp_ddp.runs.workspace import local_folder
from tests.sync_runs import another_user

PROGRAM = """
import sys
from kfp_ddp.core.folders import scratch_dir
(scratch_dir() / "file").touch()
print(scratch_dir(), flush=True)
sys.stdin.read(1)
raise SystemExit(int(sys.argv[1]))
"""
POD = ("KFP_POD_NAME", "KUBERNETES_SERVICE_HOST", folders.SCRATCH_VARIABLE)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of all users."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in POD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@contextmanager
def command(code: int = 0) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A command that ends with this code, or is killed, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("code", [0, 3])
def test_the_folder_is_ours_and_is_removed_at_the_end(temporary: Path, code: int) -> None:
    (temporary / "kfp-ddp").mkdir()
    (temporary / "kfp-ddp").chmod(0o777)
    with command(code) as (_, folder):
        assert folder.parent == temporary
        assert folder.name != "kfp-ddp"
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == [temporary / "kfp-ddp"]
    assert not list((temporary / "kfp-ddp").iterdir())


def test_what_a_killed_command_left_is_removed_and_nothing_else(temporary: Path) -> None:
    with command() as (process, killed):
        process.send_signal(signal.SIGKILL)
    victim = temporary / "victim"
    victim.mkdir()
    (temporary / "kfp-ddp-scratch-link").symlink_to(victim)
    shared = temporary / "kfp-ddp-scratch-shared"
    shared.mkdir()
    shared.chmod(0o777)
    with command() as (_, running):
        assert not killed.exists()
        with command() as (_, second):
            assert (running / "file").exists()
            assert second != running
    left = {victim, temporary / "kfp-ddp-scratch-link", shared}
    assert set(temporary.iterdir()) == left


def test_a_second_user_has_another_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", ".")
    with command() as (_, first):
        with another_user(temporary):
            with contextlib.ExitStack() as stack:
                stack.callback(os.seteuid, os.geteuid())
                os.seteuid(0)
                Path().chmod(0o1777)
            second = folders._scratch_of.__wrapped__(os.getpid())
            assert second.owner() == "nobody"
            assert second != first
        assert (first / "file").exists()


def test_in_a_pod_it_is_a_fixed_one_of_the_pod(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SCRATCH", str(temporary / "scratch"))
    for name in POD[:2]:
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            assert folders.scratch_dir() == temporary / "kfp-ddp"
            (temporary / "scratch").mkdir(mode=0o777)
            assert folders.scratch_dir() == temporary / "scratch"
            assert local_folder("gs://b/run/train") == temporary / "scratch/runs/run/train"
            assert (temporary / "scratch/runs").stat().st_mode & 0o777 == 0o700
            (temporary / "scratch/runs/run/train").rmdir()
            (temporary / "scratch/runs/run").rmdir()
            (temporary / "scratch/runs").rmdir()
            (temporary / "scratch").rmdir()


@pytest.mark.parametrize("kind", ["open", "link"])
@pytest.mark.parametrize("variable", [True, False])
def test_a_folder_that_others_can_write_to_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variable: bool
) -> None:
    base = temporary / "kfp-ddp"
    base.mkdir(mode=0o755)
    monkeypatch.setenv(folders.SCRATCH_VARIABLE if variable else "KFP_POD_NAME", str(base))
    monkeypatch.setattr(folders, "SCRATCH", "/no/such/folder")
    (temporary / "victim").mkdir()
    if kind == "link":
        (base / "runs").symlink_to(temporary / "victim")
    else:
        (base / "runs").mkdir()
        (base / "runs").chmod(0o777)
    with pytest.raises(StorageError, match="writable by other users"):
        local_folder("gs://b/run/train")
    if variable:
        base.chmod(0o777)
        with pytest.raises(StorageError, match="writable by other users"):
            folders.scratch_dir()
