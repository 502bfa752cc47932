"""What every destination promises; a test class of a kind of place says where it is."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage import s3
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store


def put(where: Store, tmp_path: Path, *names: str) -> None:
    """Store files, each as long as its name."""
    for name in names:
        file = tmp_path / "given"
        file.write_bytes(name.encode())
        assert where.put(file, name)


class Contract:
    """Tests that use `where`, an empty place."""

    def test_a_listing_has_names_and_sizes(self, where: Store, tmp_path: Path) -> None:
        assert list(where.list("")) == []
        put(where, tmp_path, "run/2/b", "run/2/a", "run/21/a", "CHAMPION")
        below = [("run/2/a", 7), ("run/2/b", 7)]
        assert sorted(where.list("")) == [("CHAMPION", 8), *below, ("run/21/a", 8)]
        assert sorted(where.list("run/2/")) == below
        assert sorted(where.list("run/2")) == [*below, ("run/21/a", 8)]
        assert list(where.list("absent/")) == []

    def test_one_file_exists_and_a_prefix_has_files(self, where: Store) -> None:
        assert not where.has_files()
        assert where.write("run/2/empty", b"")
        assert where.write("run/2/name", b"content")
        assert not where.write("run/2/name", b"content")
        assert where.read("run/2/name", 9) == b"content"
        assert where.exists("run/2/name")
        assert where.exists("run/2/empty")
        assert not where.exists("run/2")
        assert not where.exists("run/2/nam")
        assert not where.exists("absent/name")
        assert where.has_files()
        assert where.has_files("run/2/")
        assert not where.has_files("run/3")

    def test_a_file_may_be_deleted_twice(self, where: Store, tmp_path: Path) -> None:
        put(where, tmp_path, "run/a", "run/b")
        where.delete("run/a")
        where.delete("run/a")
        where.delete("absent/a")
        assert list(where.list("")) == [("run/b", 5)]
        assert where.read("run/a", 9) is None

    def test_a_place_that_is_tried_stays_empty(self, where: Store) -> None:
        where.prepare()
        assert list(where.list("")) == []

    def test_a_file_is_replaced_by_another_and_not_by_itself(
        self, where: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3, "PART", 5 << 20)
        file = tmp_path / "given"
        for content in (b"", b"a" * 9, b"b" * 9, os.urandom((5 << 20) + 1), b"b" * 9):
            file.write_bytes(content)
            assert where.put(file, "über/a b+c%2F?#.bin")
            assert not where.put(file, "über/a b+c%2F?#.bin")
            assert where.read("über/a b+c%2F?#.bin", len(content)) == content
        with pytest.raises(InputError, match="has more than 8 bytes"):
            where.read("über/a b+c%2F?#.bin", 8)

    def test_what_is_not_there_is_none(self, where: Store) -> None:
        assert where.read("a", 9) is None
        where.update("a", lambda result: b"made" if result is None else b"wrong")
        where.update("a", lambda result: None)
        assert where.read("a", 9) == b"made"

    def test_no_change_is_lost_among_writers_at_once(self, where: Store) -> None:
        def count(result: bytes | None) -> bytes:
            return b"%d" % (int(result or b"0") + 1)

        def writer(_: int) -> None:
            mine = open_store(where.uri)
            for _ in range(5):
                mine.update("count", count)

        with ThreadPoolExecutor(3) as writers:
            list(writers.map(writer, range(3)))
        assert where.read("count", 9) == b"15"


class OfBuckets:
    """Tests of stores, at the bucket of `where`."""

    def test_a_listing_ends_at_its_own_prefix(self, where: Store, tmp_path: Path) -> None:
        put(open_store(f"{where.uri}-old"), tmp_path, "x")
        assert list(where.list("")) == []
        assert where.remote

    def test_the_object_of_a_killed_trial_is_deleted(self, where: Store) -> None:
        where.write(".probe", b"")
        where.prepare()
        assert list(where.list("")) == []

    def test_a_bucket_that_is_not_there_is_one_line(self, where: Store, tmp_path: Path) -> None:
        scheme = where.uri.partition("://")[0]
        absent = open_store(f"{scheme}://absent-bucket/x")
        given = tmp_path / "given"
        given.touch()
        for ask in (
            absent.prepare,
            lambda: absent.read("a", 9),
            lambda: absent.put(given, "a"),
            lambda: list(absent.list("")),
        ):
            with pytest.raises(InputError, match="absent-bucket does not exist"):
                ask()
