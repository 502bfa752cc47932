"""How many connections a transfer opens for large bodies, told from what the last ones brought."""

import pytest

from kfp_ddp.datasets.transfer import BUSY, Growth

IDLE = BUSY / 2


def decisions(*periods: tuple[float, float]) -> list[bool]:
    """What is told after each of these periods of (processors in use, bytes a second)."""
    growth = Growth(lambda: 0)
    return [growth.of_use(busy, rate) for busy, rate in periods]


@pytest.mark.parametrize(
    ("told", "periods", "grows"),
    [
        ("an idle processor waits for the link", [(IDLE, 10), (IDLE, 10)], [True, True]),
        ("nothing arrived yet, so nothing is known", [(IDLE, 0), (1, 0)], [False, False]),
        ("twice as many brought twice as much", [(1, 100), (2, 200), (4, 400)], [True] * 3),
        ("twice as many brought no more", [(1, 100), (1.2, 105)], [True, False]),
        ("a lucky period later is no reason", [(1, 100), (1, 100), (1, 900)], [True, False, False]),
        ("an idle processor later is", [(1, 100), (1, 100), (IDLE, 50)], [True, False, True]),
    ],
)
def test_large_bodies_at_once_grow_as_long_as(
    told: str, periods: list[tuple[float, float]], grows: list[bool]
) -> None:
    assert decisions(*periods) == grows, told
