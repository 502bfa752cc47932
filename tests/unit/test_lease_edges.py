"""Leases at their limits: on a disk that is away, among what is none, and while others leave."""

import os
import stat
import time
from pathlib import Path

import pytest

from kfp_ddp.storage import leases as lease


def old(path: Path) -> None:
    os.utime(path, (1.0, 1.0), follow_symlinks=False)


def test_a_lease_is_left_in_a_folder_that_is_made_and_all_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        lease.write_permanent(tmp_path / "deep" / "leases", "run")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "deep" / "leases").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_lease_counts_until_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_now", lambda folder: 10_000.0)
    for name, age in (("a", 899), ("b", 900), ("c", 901)):
        (tmp_path / f"{name}.left").touch()
        os.utime(tmp_path / f"{name}.left", (10_000 - age,) * 2)
    assert lease.folder_holders(tmp_path) == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.left"]


def test_a_link_counts_by_its_own_time(tmp_path: Path) -> None:
    """And not by that of what it leads to, which need not be there."""
    (tmp_path / "target").touch()
    old(tmp_path / "target")
    leases = tmp_path / "leases"
    leases.mkdir()
    (leases / "new.1").symlink_to(tmp_path / "target")
    (leases / "dangling.1").symlink_to(tmp_path / "nothing")
    (leases / "old.1").symlink_to(leases)
    old(leases / "old.1")
    assert lease.folder_holders(leases) == ["dangling", "new"]
    assert not (leases / "old.1").is_symlink()


def test_what_cannot_be_removed_is_left(tmp_path: Path) -> None:
    (tmp_path / "a.folder").mkdir()
    (tmp_path / "nodot").touch()
    for path in tmp_path.iterdir():
        old(path)
    assert lease.folder_holders(tmp_path, alive=lambda holder: False) == []
    assert (tmp_path / "a.folder").is_dir()


@pytest.mark.parametrize("last", [False, True])
def test_leases_that_go_meanwhile_hide_no_others(tmp_path: Path, last: bool) -> None:
    for name in "abc":
        (tmp_path / f"{name}.1").touch()
        old(tmp_path / f"{name}.1")
    gone: list[str] = []

    def alive(holder: str) -> bool:
        if not gone:
            others = [entry.name for entry in os.scandir(tmp_path) if entry.name[0] in "abc"]
            others.remove(f"{holder}.1")
            gone.append(others[-1 if last else 0])
            (tmp_path / gone[0]).unlink()
        return True

    left = lease.folder_holders(tmp_path, alive)
    assert left == sorted(set("abc") - {gone[0][0]})


def test_a_disk_that_is_away_for_a_while_ends_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Path] = []
    touch = lease._touch

    def away(path: Path) -> None:
        touched.append(path)
        if 1 < len(touched) < 4:
            raise OSError("away")
        touch(path)

    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.001)
    monkeypatch.setattr(lease, "_touch", away)
    until = time.monotonic() + 30
    with lease.folder_lease(tmp_path, "run"):
        while len(touched) < 6:
            assert time.monotonic() < until, "nobody renews it any more"
            time.sleep(0.001)
    assert len(set(touched)) == 1
    assert list(tmp_path.iterdir()) == []
