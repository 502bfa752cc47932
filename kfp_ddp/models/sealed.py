"""A bundle where it lies: nothing is believed of it that its manifest does not list."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.bundle import LARGEST_MANIFEST, LARGEST_SUCCESS, MANIFEST, SUCCESS, listed_in
from kfp_ddp.storage.destination import Destination


@dataclass(frozen=True)
class Sealed:
    """A folder with a manifest that `_SUCCESS` is the digest of, or one without both."""

    where: Destination
    folder: str
    """Below `where`: empty, or with a slash at its end."""
    called: str
    """What it is to its reader, such as the champion."""
    advice: str
    """What to do where it is damaged."""
    listed: Mapping[str, str] | None
    """SHA-256 of each file; None where there is no manifest, and so no bundle."""
    digest: str
    """SHA-256 of the manifest; '' without one."""

    @classmethod
    def at(cls, where: Destination, folder: str, called: str, advice: str) -> "Sealed":
        """What lies there.

        Args:
            where: The place.
            folder: As in the class, and so are the others.
            called: What it is.
            advice: What to do.

        Raises:
            InputError: it cannot be read, or manifest and `_SUCCESS` do not fit.
        """
        none = cls(where, folder, called, advice, None, "")
        manifest = where.read(folder + MANIFEST, LARGEST_MANIFEST)
        success = where.read(folder + SUCCESS, LARGEST_SUCCESS)
        if manifest is None:
            if success is not None:
                raise none.damaged(f"{MANIFEST} is missing")
            return none
        digest = hashlib.sha256(manifest).hexdigest()
        if (success or b"").decode(errors="replace").strip() != digest:
            raise none.damaged(f"{SUCCESS} is not the digest of {MANIFEST}")
        listed = listed_in(manifest.decode(errors="replace"))
        return cls(where, folder, called, advice, listed, digest)

    @property
    def version(self) -> str:
        """What the bundle is called where it is uploaded to; '' for none."""
        return self.digest[:12]

    @property
    def uri(self) -> str:
        """Where it lies."""
        return f"{self.where.uri}/{self.folder}".rstrip("/")

    def read(self, name: str, limit: int) -> bytes | None:
        """The content of a file, as the manifest lists it; None if there is none.

        Args:
            name: Of the file.
            limit: Bytes that it may have.

        Raises:
            InputError: it cannot be read, has more, or is not what the manifest lists.
        """
        content = self.where.read(self.folder + name, limit)
        if content is not None:
            self.check(name, hashlib.sha256(content).hexdigest())
        elif name in (self.listed or {}):
            raise self.damaged(f"{name} is missing")
        return content

    def check(self, name: str, digest: str) -> None:
        """Refuse a file that is not what the manifest lists; without one, all is taken.

        Raises:
            InputError: saying so.
        """
        if self.listed is not None and self.listed.get(name) != digest:
            raise self.damaged(f"{name} is not what {MANIFEST} lists")

    def damaged(self, what: str) -> InputError:
        """The error of a bundle of which something is missing or changed."""
        return InputError(f"{self.called} {self.uri} is damaged: {what}; {self.advice}")
