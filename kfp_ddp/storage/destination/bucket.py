"""What buckets of every store share: conditions instead of locks, and a check of each transfer."""

import contextlib
import io
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, TypeVar

from kfp_ddp.core.errors import InputError, KfpDdpError, StorageError
from kfp_ddp.storage.destination.place import CHANGED, SMALL, Change, Destination, sha256_of

R = TypeVar("R")
_TRIES = 20
"""To change an object before another writer does."""


class Lost(Exception):  # noqa: N818 (it is a state, and is always handled)
    """Another writer came first: the object is no longer what the condition says."""


class Found(NamedTuple):
    """An object as it was seen."""

    size: int
    digest: str
    tag: str
    """What a condition names it by; '' for an object that is not there."""


class Bucket(Destination):
    """A prefix of a bucket. A store says how one object is seen, read and written."""

    scheme: ClassVar[str]
    many_makes: ClassVar[bool] = False
    """Whether stores of many makes speak it, some of which write whatever the condition."""
    remote = True

    def __init__(self, uri: str) -> None:
        bucket, _, prefix = uri.removeprefix(f"{self.scheme}://").partition("/")
        if not bucket:
            raise InputError(f"{uri} names no bucket: write {self.scheme}://bucket/prefix")
        self.name = bucket
        self.prefix = prefix.strip("/")
        self.root = f"{self.scheme}://{bucket}"
        self.uri = f"{self.root}/{self.prefix}".rstrip("/")
        self.place = self.uri

    def prepare(self) -> None:
        """Write an object of a new name and delete it; of a store of many makes, try it twice."""
        probe = f".probe-{os.urandom(8).hex()}"

        def make() -> bool:
            try:
                self._store(probe, io.BytesIO(), 0, self._digest(io.BytesIO()), "")
            except Lost:
                return False
            return True

        self._call("written", make)
        made_twice = self.many_makes and self._call("written", make)
        with contextlib.suppress(KfpDdpError):  # who may not delete may write
            self.delete(probe)
        if made_twice:
            raise InputError(
                f"{self.root} writes over what is there although told not to (If-None-Match: *), "
                "so two runs could lose each other's champion: use a store that keeps conditions"
            )

    def fetch(self, name: str, into: BinaryIO, limit: int) -> bool:
        """Copy an object's content; False if there is none, an error if there is no bucket."""
        return self._call("read", lambda: self._load(name, into, limit, ""))

    def put(self, file: Path, name: str) -> bool:
        """Upload against what was seen, unless the same is there."""
        with file.open("rb") as content:
            digest, size = self._digest(content), content.tell()

            def same(there: Found | None) -> bool:
                return there is not None and (there.size, there.digest) == (size, digest)

            def ask() -> bool:
                there = self._look(name)
                if same(there):
                    return False
                content.seek(0)
                try:
                    self._store(name, content, size, digest, there.tag if there else "")
                except Lost:
                    # A write whose answer was lost is sent again, and finds itself.
                    if not same(self._look(name)):
                        raise
                return True

            return self._call("written", ask)

    def update(self, name: str, change: Change) -> None:
        """Write against what was read."""

        def attempt() -> bool:
            """Whether no other writer came first."""
            there, found = self._look(name), io.BytesIO()
            try:
                if there is not None and not self._load(name, found, SMALL, there.tag):
                    return False
                content = change(None if there is None else found.getvalue())
                if content is not None:
                    digest = self._digest(io.BytesIO(content))
                    tag = there.tag if there else ""
                    self._store(name, io.BytesIO(content), len(content), digest, tag)
            except Lost:
                return False
            return True

        if not any(self._call("written", attempt) for _ in range(_TRIES)):
            raise StorageError(f"{self.uri}/{name} {CHANGED}")

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _digest(self, content: BinaryIO) -> str:
        """What tells this content from another, read to its end; `Found.digest` is of the kind."""
        return sha256_of(content)

    @abstractmethod
    def _look(self, name: str) -> Found | None:
        """An object, without its content."""

    @abstractmethod
    def _load(self, name: str, into: BinaryIO, limit: int, tag: str) -> bool:
        """Copy an object as it is stored, checked; False if there is none.

        Raises:
            Lost: it is no longer that of `tag`, where one is given.
        """

    @abstractmethod
    def _store(self, name: str, content: BinaryIO, size: int, digest: str, tag: str) -> None:
        """Write an object, checked, in place of that of `tag`, or of none.

        Raises:
            Lost: another one is there.
        """

    @abstractmethod
    def _call(self, what: str, ask: Callable[[], R]) -> R:
        """Ask, and say in one line what the store answers.

        Args:
            what: What was to be done to the place: listed, read, written.
            ask: Speaks to the store.

        Raises:
            InputError: the store refuses the request, or the bucket does not exist.
            UnavailableError: the store does not respond, or reports a fault of its own.
            StorageError: another writer came first.
        """
