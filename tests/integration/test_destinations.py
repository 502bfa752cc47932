"""What every destination promises, on each kind that a test can have at hand."""

from pathlib import Path

import pytest
from google.cloud import storage

from kfp_ddp.components.shared.destination import Destination, open_destination


@pytest.fixture(params=["folder", "gs"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    """An empty place of this kind."""
    if request.param == "folder":
        return open_destination(str(tmp_path / "results"))
    request.getfixturevalue("emulator")
    return open_destination("gs://models/results/of/")


def put(where: Destination, tmp_path: Path, *names: str) -> None:
    """Store files, each as long as its name."""
    for name in names:
        file = tmp_path / "given"
        file.write_bytes(name.encode())
        assert where.put(file, name)


def test_a_listing_has_names_and_sizes_below_a_prefix(where: Destination, tmp_path: Path) -> None:
    assert list(where.list("")) == []
    put(where, tmp_path, "run/2/b", "run/2/a", "run/21/a", "CHAMPION")
    assert sorted(where.list("")) == [
        ("CHAMPION", 8),
        ("run/2/a", 7),
        ("run/2/b", 7),
        ("run/21/a", 8),
    ]
    assert sorted(where.list("run/2/")) == [("run/2/a", 7), ("run/2/b", 7)]
    assert sorted(where.list("run/2")) == [("run/2/a", 7), ("run/2/b", 7), ("run/21/a", 8)]
    assert list(where.list("absent/")) == []


def test_what_is_deleted_is_gone_and_may_be_deleted_again(
    where: Destination, tmp_path: Path
) -> None:
    put(where, tmp_path, "run/a", "run/b")
    where.delete("run/a")
    where.delete("run/a")
    where.delete("absent/a")
    assert list(where.list("")) == [("run/b", 5)]
    assert where.read("run/a", 9) is None


def test_a_listing_leaves_out_what_another_destination_holds(emulator: storage.Client) -> None:
    emulator.bucket("models").blob("results/of-old/x").upload_from_string("x")
    assert list(open_destination("gs://models/results/of").list("")) == []


def test_links_and_files_on_their_way_are_not_listed(tmp_path: Path) -> None:
    outside, results = tmp_path / "outside", tmp_path / "results"
    outside.mkdir()
    (outside / "x").write_text("x")
    where = open_destination(str(results))
    put(where, tmp_path, "run/a")
    where.update("CHAMPION", lambda _: b"a")
    (results / "run" / "link").symlink_to(outside / "x")
    (results / "folder").symlink_to(outside)
    (results / "run" / ".0123456789abcdef.tmp").write_text("half")
    assert sorted(where.list("")) == [("CHAMPION", 1), ("run/a", 5)]
    where.delete("folder/x")
    where.delete("run/link")
    assert (outside / "x").read_text() == "x"
