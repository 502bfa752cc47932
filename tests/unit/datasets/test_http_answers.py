"""Answers of HTTP servers, and how many connections a transfer opens."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kfp_ddp.datasets.transfer import BUSY, Growth
from kfp_ddp.storage.http.answer import BLOCK, HttpError, Response
from tests.sync_runs import mangled

LIMIT = 400
WHOLE, CUT, MANGLED = 4000, 20_000, 20_000
FRAMING = (b"\r\n", b"-", b"f", b"\0", b"0\r\n\r\n", b" ")
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\nContent-Length: 7\r\n\r\n"
IDLE = BUSY / 2


class Made(NamedTuple):
    """An answer as it is sent, the body that it stands for, and whether its end can be told."""

    sent: bytes
    body: bytes
    framed: bool


def made(choose: random.Random, longest: int = LIMIT) -> Made:
    """A good answer, with whatever HTTP/1 allows."""
    body = choose.randbytes(choose.choice([0, 1, choose.randrange(longest + 1)]))
    if choose.random() < 0.3:  # one that looks like framing
        body = (b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" * 40)[: len(body)]
    interim = choose.choice([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", HINTS])
    head = interim + b"HTTP/1.1 200 OK\r\n" + choose.choice([b"", b"X: y\r\n", b"ETag:\t \r\n"])
    form = choose.choice(["sized", "chunked", "unsized"])
    if form == "sized":
        name = choose.choice([b"Content-Length", b"content-length", b"CONTENT-LENGTH"])
        return Made(head + b"%b: %d\r\n\r\n%b" % (name, len(body), body), body, True)
    if form == "unsized":
        return Made(head + b"\r\n" + body, body, False)
    parts, rest = [], body
    while rest:
        size = choose.randrange(1, len(rest) + 1)
        zeros, more = choose.choice(["", "000"]), choose.choice([b"", b";a=b", b" ;q"])
        parts.append(b"%b%b\r\n%b\r\n" % (f"{zeros}{size:x}".encode(), more, rest[:size]))
        rest = rest[size:]
    trailers = choose.choice([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"])
    sent = head + b"Transfer-Encoding: Chunked\r\n\r\n" + b"".join(parts) + b"0\r\n" + trailers
    return Made(sent + b"\r\n", body, True)


def pieces(choose: random.Random, sent: bytes) -> Iterator[bytes]:
    """As it may arrive."""
    while sent:
        size = choose.choice([1, 2, 7, len(sent), choose.randrange(1, len(sent) + 1)])
        yield sent[:size]
        sent = sent[size:]


def taken(choose: random.Random, sent: bytes, limit: int = LIMIT) -> tuple[Response, bytes]:
    """What is made of it when the connection ends after it."""
    answer, body = Response(limit), b""
    for piece in pieces(choose, sent):
        answer.feed(piece)
        body += b"".join(answer.take())
        assert len(body) <= limit or answer.status >= 300
        if answer.complete:
            return answer, body
    answer.finish()
    return answer, body + b"".join(answer.take())


def test_whole_answers_give_their_bodies() -> None:
    choose = random.Random(1)
    for _ in range(WHOLE):
        case = made(choose)
        answer, body = taken(choose, case.sent)
        assert (answer.status, body) == (200, case.body), case.sent
        assert answer.keeps is case.framed


def test_cut_answers_are_never_taken_for_whole_ones() -> None:
    choose = random.Random(2)
    cut = 0
    while cut < CUT:
        case = made(choose, 60)
        telling = len(case.sent) if case.framed else len(case.sent) - len(case.body)
        for end in range(telling):
            cut += 1
            with pytest.raises(HttpError):
                taken(choose, case.sent[:end])


def test_mangled_answers_are_errors_or_answers_within_their_limit() -> None:
    choose = random.Random(3)
    refused = 0
    for _ in range(MANGLED):
        sent = mangled(choose, made(choose).sent, FRAMING)
        try:
            taken(choose, sent)
        except HttpError:
            refused += 1
    assert MANGLED // 10 < refused < MANGLED


@pytest.mark.parametrize(
    ("head", "numbers"),
    [
        ("Transfer-Encoding: chunked\r\n\r\n", ["", "g", " 5", "1" * 16]),
        ("Content-Length: ", ["1,1", "1" * 19]),
    ],
)
def test_invalid_sizes_and_lengths_are_refused(head: str, numbers: list[str]) -> None:
    for number in (*numbers, "-1", "+1", "0x1", "1_0", "1 1", "٥"):
        with pytest.raises(HttpError, match=r"chunk size|content-length"):
            Response(LIMIT).feed(f"HTTP/1.1 200 OK\r\n{head}{number}\r\n\r\n".encode())


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 401\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n191\r\n" + b"x" * 401,
        b"\r\n" + b"x" * 401,
    ],
)
def test_more_than_was_listed_is_refused_before_it_is_there(head: bytes) -> None:
    with pytest.raises(HttpError, match="more than 400 bytes"):
        Response(LIMIT).feed(b"HTTP/1.1 200 OK\r\n" + head)
    refusal = Response(0)
    refusal.feed(b"HTTP/1.1 403 No\r\n" + head)
    assert refusal.size <= BLOCK, "the words of a refusal may be longer than the object"


@pytest.mark.parametrize(
    ("caught", "periods", "grows"),
    [
        ("an idle processor waits for the link", [(IDLE, 10), (IDLE, 10)], [True, True]),
        ("nothing arrived yet, so nothing is known", [(IDLE, 0), (1, 0)], [False, False]),
        ("twice as many brought twice as much", [(1, 100), (2, 200), (4, 400)], [True] * 3),
        ("twice as many brought no more", [(1, 100), (1.2, 105)], [True, False]),
        ("a lucky period later is no reason", [(1, 100), (1, 100), (1, 900)], [True, False, False]),
        ("an idle processor later is", [(1, 100), (1, 100), (IDLE, 50)], [True, False, True]),
    ],
)
def test_growth(caught: str, periods: list[tuple[float, float]], grows: list[bool]) -> None:
    """Periods are of processors in use, and of bytes a second."""
    growth = Growth(lambda: 0)
    assert [growth.more_connections_help(busy, rate) for busy, rate in periods] == grows, caught
