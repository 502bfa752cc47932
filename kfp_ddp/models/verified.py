"""A bundle looked at whole: each file against the manifest, and the manifest's signature."""

import hashlib
from dataclasses import dataclass
from typing import Any

from kfp_ddp.models.bundle import MANIFEST, SIGNATURE, SUCCESS
from kfp_ddp.models.open_bundle import open_bundle
from kfp_ddp.models.signature import Signer, check

_LARGEST_FILE = 1 << 40
ADVICE = "do not use it: publish it again"


@dataclass(frozen=True)
class Verified:
    """A bundle of which every file is what its manifest lists."""

    uri: str
    version: str
    files: int
    size: int
    """Bytes of them all."""
    signed: bool
    """Whether there is a signature in it."""
    by: str
    """Who vouches for it; '' where nobody was asked for."""


def verified(
    address: str, signer: Signer | None = None, signature: bytes | None = None
) -> Verified:
    """Read all of a bundle, and refuse it where anything is not as its manifest lists it.

    Args:
        address: As `open_bundle` takes it.
        signer: Who has to vouch for it; None for nobody.
        signature: A signature that lies elsewhere than in the bundle.

    Raises:
        InputError: there is no bundle, it is damaged, or the signer does not vouch for it.
    """
    sealed = open_bundle(address, ADVICE)
    if signer is not None:
        check(sealed, signer, signature)
    where, listed, start = sealed.where, sealed.listed or {}, len(sealed.folder)
    there = {name[start:] for name, _ in where.list(sealed.folder)}
    unlisted = there - listed.keys() - {MANIFEST, SUCCESS, SIGNATURE}
    if unlisted:
        raise sealed.damaged(f"{min(unlisted)} is not in {MANIFEST}")
    size = 0
    for name in listed:
        read: Any = _Digest()
        if name not in there or not where.fetch(sealed.folder + name, read, _LARGEST_FILE):
            raise sealed.damaged(f"{name} is missing")
        sealed.check(name, read.digest.hexdigest())
        size += read.size
    by = signer.name if signer is not None else ""
    return Verified(sealed.uri, sealed.version, len(listed), size, SIGNATURE in there, by)


class _Digest:
    """Takes what a file holds for its digest alone; the part of a file that `fetch` writes to."""

    def __init__(self) -> None:
        self._begin()

    def write(self, block: bytes) -> int:
        """Take more."""
        self.digest.update(block)
        self.size += len(block)
        return len(block)

    def seek(self, start: int) -> int:
        """Begin again, which is all that is asked for."""
        self._begin()
        return start

    def truncate(self) -> int:
        """Nothing is kept."""
        return 0

    def _begin(self) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
