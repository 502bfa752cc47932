"""Lines of a stream, also without line ends, and how a progress bar is printed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.jobs.follow.logs import LONGEST, LogCursor, drawn, unprinted
from kfp_ddp.k8s.api import split_lines

BAR = "".join(f"\r{percent}%|{'#' * percent}" for percent in range(101))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chunks=st.lists(st.binary(max_size=40) | st.text("ab\r\n", max_size=9).map(str.encode)))
def test_lines_do_not_depend_on_the_chunks_of_a_stream(chunks: list[bytes]) -> None:
    text = b"".join(chunks)
    *complete, rest = text.split(b"\n")
    assert list(split_lines(chunks)) == [line + b"\n" for line in complete] + [rest] * bool(rest)
    pieces = list(split_lines(chunks, 10))
    assert pieces == list(split_lines([text], 10))
    assert max(map(len, pieces), default=0) <= 11
    assert b"".join(pieces).replace(b"\n", b"") == text.replace(b"\n", b"")


def test_a_line_without_an_end_is_split() -> None:
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
def test_only_the_last_state_of_a_bar_is_printed(text: str, shown: str) -> None:
    assert drawn(text) == shown


def test_each_piece_of_a_long_line_is_printed_once_after_a_cut() -> None:
    stamp = "2026-01-01T00:00:00.5Z"
    lines = [f"{stamp} one", f"{stamp} " + "x" * 5, "y" * 6, "z", f"{stamp} two"]
    whole = list(unprinted(lines, 0, None))
    assert [text for _, text in whole] == ["one", "x" * 5, "y" * 6, "z", "two"]
    for done in range(len(lines)):
        cursor: LogCursor = whole[done][0]
        again = [text for _, text in unprinted(lines, 0, cursor)]
        assert again == [text for _, text in whole[done + 1 :]]
    assert list(unprinted(["no time at all"], 0, None)) == []
