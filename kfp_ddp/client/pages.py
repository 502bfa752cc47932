"""Lists of a KFP API server, which come in pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kfp_ddp.core.errors import ServerError

T = TypeVar("T")


def pages(ask: Callable[[str], tuple[Sequence[T] | None, str | None]]) -> Iterator[Sequence[T]]:
    """The pages of a list, until one names no next.

    Args:
        ask: Gives the page of a token, '' for the first, and the next one's token.

    Raises:
        ServerError: a page leads to one that was read before, so the list would lack something.
    """
    token, read = "", set[str]()
    while True:
        found, following = ask(token)
        yield found or ()
        read.add(token)
        token = following or ""
        if not token:
            return
        if token in read:
            raise ServerError("KFP's list leads back to a page that was read before; try again")
