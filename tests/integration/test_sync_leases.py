"""Old versions go when nobody uses them: not while somebody holds one, however old it is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_ddp.core.errors import StorageError
from kfp_ddp.datasets import report
from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.report import Result
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.versions import Store, leases_of
from kfp_ddp.jobs import identity
from kfp_ddp.storage.leases import folder_lease

ONE = Options(keep_versions=1, keep_hours=0)


class Claim:
    """A source of one file and a target of its versions."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "source", folder / "target"
        self.source.mkdir()

    def version(self, number: int, run_id: str = "", options: Options = ONE) -> Result:
        """Sync the source as it is at that number."""
        (self.source / "x").write_bytes(bytes([number]))
        return sync(str(self.source), self.target, options, run_id=run_id)

    def age(self, days: float = 30) -> None:
        """Let that many days go by for all that is there."""
        then = time.time() - days * 86400
        for path in [*self.target.glob("versions/*/_SUCCESS"), *self._leases()]:
            os.utime(path, (then, then))

    def _leases(self) -> list[Path]:
        return list(self.target.glob(".kfsync/leases/*/*"))


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(tmp_path)


def cluster(monkeypatch: pytest.MonkeyPatch, alive: Callable[[str], bool]) -> None:
    monkeypatch.setattr(identity, "live_runs", lambda: alive)  # a cluster cannot be had here


def test_version_of_a_live_run_stays(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    live = {"run-1"}
    cluster(monkeypatch, live.__contains__)
    first = claim.version(1, "run-1")
    claim.age()
    assert claim.version(2, "run-2").removed_versions == ()
    claim.age()
    third = claim.version(3, "run-3")
    assert len(third.removed_versions) == 1, "that of run-2, which is over"
    assert first.path.is_dir()
    live.clear()
    claim.age()
    last = claim.version(4, "run-4")
    assert set(last.removed_versions) == {first.path.name, third.path.name}
    held = claim.target / ".kfsync" / "leases"
    assert [path.name for path in held.iterdir()] == [last.path.name], "none of what is gone"


def test_version_that_a_step_reads_now_stays(claim: Claim) -> None:
    first = claim.version(1)
    claim.age()
    leases = leases_of(first.path)
    assert leases is not None
    with folder_lease(leases, "a step"):
        assert claim.version(2).removed_versions == ()
    claim.age()
    assert claim.version(3).removed_versions != ()
    assert not first.path.exists()


def test_nothing_goes_without_a_cluster(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Callable[[str], bool]:
        raise StorageError("which runs live cannot be seen (forbidden); apply deploy/rbac")

    monkeypatch.setattr(identity, "live_runs", refuse)
    first = claim.version(1)
    claim.age()
    second = claim.version(2)
    assert first.path.is_dir()
    assert "which runs live cannot be seen" in second.kept_why
    assert "none, though there are: which runs live" in report.markdown(second)
    assert "no old version was removed: which runs live cannot be seen" in report.line(second)


def test_version_handed_out_meanwhile_stays(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing one takes minutes: what was seen before it says nothing about the next."""
    found = [claim.version(number, options=Options(keep_versions=0)) for number in range(3)]
    for at, each in enumerate(found):
        os.utime(each.path / "_SUCCESS", (10**9 - at, 10**9 - at))
    cluster(monkeypatch, lambda run_id: False)
    clear = Store.clear
    oldest = found[2]

    def slowly(self: Store, gone: list[str]) -> None:
        clear(self, gone)
        if any(found[1].path.name in name for name in gone):
            assert Store(claim.target).hand_out(oldest.digest)

    monkeypatch.setattr(Store, "clear", slowly)
    last = claim.version(9)
    assert set(last.removed_versions) == {found[0].path.name, found[1].path.name}
    assert oldest.path.is_dir(), "it was handed out a moment ago"
