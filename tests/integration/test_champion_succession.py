"""Beside a model's exports it is noted who followed whom as the champion."""

import pytest

from kfp_ddp.models import champion as champions
from kfp_ddp.models.champion import move
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

A, B, C = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture
def where(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("exports")))


def moves(where: Store) -> list[tuple[str, str, str]]:
    return [(one.version, one.replaced, one.by) for one in champions.history(where, "m")]


def test_each_move_is_noted_once_with_whom_it_replaced_and_who_asked(where: Store) -> None:
    move(where, "m", A, "", "run-1")
    move(where, "m", B, A, "run-2")
    move(where, "m", B, A, "run-2")
    assert move(where, "m", C, A, "run-3") == B  # too late
    assert moves(where) == [(A, "", "run-1"), (B, A, "run-2")]
    assert champions.history(open_store(f"{where.uri}/m")) == champions.history(where, "m")


def test_a_step_back_is_no_step_forward(where: Store) -> None:
    for version, expected, by in ((A, "", "run"), (B, A, "run"), (C, B, "promote")):
        move(where, "m", version, expected, by)
    move(where, "m", B, C, champions.ROLLBACK)
    known = champions.history(where, "m")
    assert [champions.replaced_by(known, version) for version in (A, B, C)] == ["", A, B]
    assert champions.replaced_by(known, "d" * 12) is None


def test_a_move_whose_note_was_lost_is_noted_by_the_next_try(where: Store) -> None:
    move(where, "m", A, "", "run-1")
    where.update("m/CHAMPION", lambda _: f"{B}\n".encode())
    move(where, "m", B, A, "run-2")
    assert moves(where) == [(A, "", "run-1"), (B, A, "run-2")]


def test_the_newest_stay_and_what_is_no_note_is_left_out(where: Store) -> None:
    versions = [f"{number:012x}" for number in range(50)]
    where.update(f"m/{champions.CHAMPIONS}", lambda _: b"not json\n\xff\n{}\n")
    for before, version in zip(["", *versions], versions, strict=False):
        move(where, "m", version, before, "x" * 1000)
    assert [version for version, _, _ in moves(where)] == versions[-20:]
    assert champions.replaced_by(champions.history(where, "m"), versions[-1]) == versions[-2]
