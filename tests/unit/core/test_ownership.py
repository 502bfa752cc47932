"""The user's key, and what its seals hold for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.ownership import is_sealed, mark, seal


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's key, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "kfp-ddp" / "key"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    mark(tmp_path / "folder")
    return tmp_path / "folder"


def test_a_seal_holds_for_its_folder_alone(folder: Path, key: Path) -> None:
    made = seal(folder, "text")
    mark(folder)
    assert is_sealed(folder, "text", made)
    assert is_sealed(folder.parent / "config" / ".." / "folder", "text", made)
    assert (key.stat().st_mode & 0o777, key.stat().st_size) == (0o600, 32)
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    for other in ("", "Text", "text\0", "é"):
        assert not is_sealed(folder, other, made)
        assert not is_sealed(folder, "text", other)
    copy = Path(shutil.copytree(folder, folder.with_name("copy"), copy_function=shutil.copy2))
    assert not is_sealed(copy, "text", made)
    folder.rename(folder.with_name("first"))
    copy.rename(folder)
    assert not is_sealed(folder, "text", made), "a copy in the same place"
    shutil.rmtree(folder)
    folder.with_name("first").rename(folder)
    assert is_sealed(folder, "text", made)
    key.unlink()
    assert not is_sealed(folder, "text", made), "another user"


def test_a_mark_of_any_kind_is_no_proof(tmp_path: Path, folder: Path) -> None:
    made = seal(folder, "text")
    for name in ("folder", "link", "nothing"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / "folder" / "x" / ".kfp-ddp").mkdir()
    (tmp_path / "link" / "x" / ".kfp-ddp").symlink_to(folder / ".kfp-ddp")
    for name in ("folder", "link", "nothing"):
        assert not is_sealed(tmp_path / name / "x", "text", made)
        mark(tmp_path / name / "x")
        assert not is_sealed(tmp_path / name / "x", "text", made)


def test_commands_that_begin_at_once_have_one_key(folder: Path) -> None:
    program = (
        "import pathlib, sys; from kfp_ddp.core.ownership import seal; "
        "print(seal(pathlib.Path(sys.argv[1]), ''))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate()[0].strip() for process in started}
    assert answers == {seal(folder, "")}


@pytest.mark.parametrize("fault", ["readable", "short", "long", "link", "folder", "pipe", "theirs"])
def test_a_key_that_others_may_know_is_refused(
    folder: Path, key: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(folder, "text")
    content = key.read_bytes()
    match fault:
        case "readable":
            key.chmod(0o640)
        case "short" | "long":
            key.write_bytes(content[:-1] if fault == "short" else content + b"x")
        case "theirs":
            other = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: other)
        case _:
            key.rename(key.with_name("moved"))
            if fault == "link":
                key.symlink_to("moved")
            elif fault == "folder":
                key.mkdir()
            else:
                os.mkfifo(key, 0o600)
    with pytest.raises(InputError, match=str(key)):
        seal(folder, "text")


def test_without_a_folder_for_the_key_a_run_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="XDG_CONFIG_HOME"):
        seal(folder, "text")
