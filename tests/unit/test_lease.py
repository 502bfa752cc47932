"""What somebody uses is told from what nobody does."""

import os
import time
from pathlib import Path

import pytest

from kfp_ddp.storage import leases as lease


def _age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_lease_counts_while_its_holder_works_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    assert lease.folder_holders(folder) == []
    with lease.folder_lease(folder, "run-a"), lease.folder_lease(folder, "run-b"):
        assert lease.folder_holders(folder) == ["run-a", "run-b"]
        with lease.folder_lease(folder, "run-a"):
            pass
        assert lease.folder_holders(folder) == ["run-a", "run-b"]
    assert lease.folder_holders(folder) == []
    assert list(folder.iterdir()) == []


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.01)
    with lease.folder_lease(tmp_path, "run"):
        (file,) = tmp_path.iterdir()
        _age(file, 10 * lease.LASTING_SECONDS)
        old = file.stat().st_mtime
        while file.stat().st_mtime == old:
            time.sleep(0.01)
        assert lease.folder_holders(tmp_path) == ["run"]


def test_what_a_dead_holder_left_counts_for_a_while_then_goes(tmp_path: Path) -> None:
    lease.write_permanent(tmp_path, "run")
    (file,) = tmp_path.iterdir()
    _age(file, lease.LASTING_SECONDS - 60)
    assert lease.folder_holders(tmp_path) == ["run"]
    _age(file, lease.LASTING_SECONDS + 60)
    assert lease.folder_holders(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lives_holds_what_it_was_handed_however_long_it_waits(tmp_path: Path) -> None:
    lease.write_permanent(tmp_path, "queued.run")
    (file,) = tmp_path.iterdir()
    _age(file, 1e7)
    assert lease.folder_holders(tmp_path, alive=lambda run: run == "queued.run") == ["queued.run"]
    assert lease.folder_holders(tmp_path, alive=lambda run: run == "other") == []


def test_a_clock_that_is_off_on_this_machine_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease.write_permanent(tmp_path, "run")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert lease.folder_holders(tmp_path) == ["run"]


def test_where_nothing_can_be_written_a_step_works_without_a_lease(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with lease.folder_lease(tmp_path / "file", "run"):
        pass
    with lease.folder_lease(tmp_path / "file" / "below", "run"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_in_the_place_of_a_lease_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    _age(outside, 1e7)
    before = outside.stat().st_mtime
    leases = tmp_path / "leases"
    leases.mkdir()
    (leases / "run.left").symlink_to(outside)
    with pytest.raises(OSError, match=r"symbolic|links"):
        lease.write_permanent(leases, "run")
    assert outside.stat().st_mtime == before


@pytest.mark.parametrize("planted", ["folder", "lease", "pipe"])
def test_planted_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "leases"
    outside.mkdir()
    (outside / "run.left").write_text("mine")
    _age(outside / "run.left", 10 * lease.LASTING_SECONDS)
    before = (outside / "run.left").stat()
    if planted == "folder":
        folder.symlink_to(outside)
        with pytest.raises(NotADirectoryError):
            lease.write_permanent(folder, "run")
        with pytest.raises(NotADirectoryError):
            lease.folder_holders(folder)
    else:
        folder.mkdir()
        if planted == "pipe":
            os.mkfifo(folder / "run.left")
        else:
            (folder / "run.left").symlink_to(outside / "run.left")
        with pytest.raises(OSError, match=r"links|device"):
            lease.write_permanent(folder, "run")
        lease.folder_holders(folder)
    assert (outside / "run.left").stat() == before
    assert list(outside.iterdir()) == [outside / "run.left"]
