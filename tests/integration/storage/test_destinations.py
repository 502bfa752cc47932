import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.destinations import Contract, OfBuckets, put
from tests.gcs_server import Bucket


class TestFolder(Contract):
    @pytest.fixture
    def where(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "results"))

    def test_links_and_temporary_files_are_not_listed(self, where: Store, tmp_path: Path) -> None:
        outside, results = tmp_path / "outside", tmp_path / "results"
        outside.mkdir()
        (outside / "x").write_text("x")
        put(where, tmp_path, "run/a")
        where.update("CHAMPION", lambda _: b"a")
        (results / "run" / "link").symlink_to(outside / "x")
        (results / "folder").symlink_to(outside)
        (results / "run" / ".0123456789abcdef.tmp").write_text("half")
        assert sorted(where.list("")) == [("CHAMPION", 1), ("run/a", 5)]
        where.delete("folder/x")
        where.delete("run/link")
        assert (outside / "x").read_text() == "x"

    def test_any_user_may_lock_what_another_locked(self, where: Store, tmp_path: Path) -> None:
        before = os.umask(0o022)
        try:
            where.update("CHAMPION", lambda _: b"a")
        finally:
            os.umask(before)
        (lock,) = (tmp_path / "results").glob(".*.lock")
        assert stat.S_IMODE(lock.stat().st_mode) == 0o666

    @pytest.mark.parametrize("name", ["../a", "/a", "run/../../a", "a\0"])
    def test_names_that_lead_elsewhere_are_one_line(self, where: Store, name: str) -> None:
        where.write("run/a", b"a")
        for ask in (where.exists, where.delete, lambda name: where.read(name, 9)):
            with pytest.raises(InputError, match="is not a name below"):
                ask(name)
        with pytest.raises(InputError, match=r"^cannot write .*/run/a/b: Not a directory"):
            where.write("run/a/b", b"")

    def test_full_disk_of_a_reader_is_no_source_fault(self, where: Store, tmp_path: Path) -> None:
        put(where, tmp_path, "run/a")
        with (
            open("/dev/full", "wb", buffering=0) as full,
            pytest.raises(StorageError, match="the copy of"),
        ):
            where.fetch("run/a", full, 99)


class TestGoogle(OfBuckets, Contract):
    @pytest.fixture
    def where(self, bucket: Bucket) -> Store:
        return open_store("gs://bucket/results/of/")


class TestS3(OfBuckets, Contract):
    @pytest.fixture
    def where(self, s3: Any) -> Store:
        return open_store("s3://bucket/results/of/")
