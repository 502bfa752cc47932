"""Lines out of a stream that may never end one, and how a bar in it is shown."""

import random

import pytest

from kfp_ddp.jobs.follow.logs import LONGEST, LogCursor, drawn, unprinted
from kfp_ddp.k8s.api import split_lines

BAR = "".join(f"\r{percent}%|{'#' * percent}" for percent in range(101))


def chunked(text: bytes, rng: random.Random) -> list[bytes]:
    """The same bytes in pieces of chance, as a network brings them."""
    found, at = [], 0
    while at < len(text):
        step = rng.choice((1, 2, 3, 7, 50, 400))
        found.append(text[at : at + step])
        at += step
    return found


@pytest.mark.parametrize("seed", range(300))
def test_lines_do_not_depend_on_how_a_stream_is_cut_into_chunks(seed: int) -> None:
    rng = random.Random(seed)
    text = bytes(rng.choice(b"ab\r\n\x00\xff") for _ in range(rng.randrange(600)))
    text += b"x" * rng.choice((0, 5, 10, 11, 100)) + rng.choice((b"", b"\n"))
    lines = list(split_lines(chunked(text, rng)))
    assert lines == [each + b"\n" for each in text.split(b"\n")[:-1]] + (
        [text.split(b"\n")[-1]] if text and not text.endswith(b"\n") else []
    )
    pieces = list(split_lines(chunked(text, rng), 10))
    assert pieces == list(split_lines([text], 10))
    assert max(map(len, pieces), default=0) <= 11
    assert b"".join(pieces).replace(b"\n", b"") == text.replace(b"\n", b"")


def test_a_line_that_never_ends_comes_all_the_same() -> None:
    """A million of them would be put together anew with each chunk, and none of it shown."""
    chunks = iter([b"2026-01-01T00:00:00Z " + BAR.encode() * 3] + [BAR.encode()] * 3)
    first = next(split_lines(chunks, LONGEST))
    assert len(first) == LONGEST + 1
    assert first.endswith(b"\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("", ""),
        ("of windows\r", "of windows"),
        ("\r\r", ""),
        (BAR, f"100%|{'#' * 100}"),
        (f"{BAR}\rdone\r", "done"),
    ],
)
def test_of_a_bar_only_its_last_state_is_printed(text: str, shown: str) -> None:
    assert drawn(text) == shown


def test_the_pieces_of_a_long_line_are_each_printed_once_over_a_cut() -> None:
    stamp = "2026-01-01T00:00:00.5Z"
    lines = [f"{stamp} one", f"{stamp} " + "x" * 5, "y" * 6, "z", f"{stamp} two"]
    whole = list(unprinted(lines, 0, None))
    assert [text for _, text in whole] == ["one", "x" * 5, "y" * 6, "z", "two"]
    for done in range(len(lines)):
        cursor: LogCursor = whole[done][0]
        again = [text for _, text in unprinted(lines, 0, cursor)]
        assert again == [text for _, text in whole[done + 1 :]]
    assert list(unprinted(["no time at all"], 0, None)) == []
