"""A dataset of the Hugging Face Hub that is kept as files: hf://datasets/owner/name@revision/folder.

The listing is of one commit, so nothing changes under a sync. The hub gives the SHA-256 of files in
large file storage and git's own SHA-1 of others, with which every body is checked.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from kfp_ddp.core.errors import InputError, KfpDdpError, UnavailableError
from kfp_ddp.storage.destination.place import held
from kfp_ddp.storage.http.origin import Origin
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.retry import is_temporary
from kfp_ddp.storage.sources import Changed, Entry, Transient, check_end
from kfp_ddp.storage.sources.blocking import BlockingReader, Stream

_URL = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.*))?"
)
_BLOCK = 1 << 20
_PAGE = 1_000
"""Files of a page of a listing, at most."""
MAX_PAGE = 1 << 24
"""Bytes of a page: 1,000 paths of 2,048 characters, each six times as long as JSON may write it."""
_GITS_OWN = ".gitattributes"


class HuggingFaceSource:
    """The files of a dataset at a commit; HF_TOKEN and HF_ENDPOINT apply."""

    resumes = False
    """The whole is checked at its end, so a broken body starts again."""
    max_workers = 32

    def __init__(self, url: str, timeout: float) -> None:
        try:
            self._api = _hub()
        except ImportError as error:
            raise InputError(
                f"source {url} needs huggingface-hub; pip install 'kfp-ddp[huggingface]'"
            ) from error
        parts = _URL.fullmatch(url)
        if parts is None:
            raise InputError(
                f"source {url!r} is no dataset of the hub: write hf://datasets/owner/name, with "
                "@revision behind the name and /folder at the end where you need them"
            )
        self.url, self._timeout = url, timeout
        self._name, self._revision = parts["name"], parts["revision"]
        folder = (parts["folder"] or "").strip("/")
        self._prefix = f"{folder}/" if folder else ""
        self.exposed = Origin.of(self._api.endpoint).exposed

    def listing(self) -> Listing:
        """List the folder at the revision's commit; see `Source.listing`."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        try:
            _bound_pages()
            about = self._api.dataset_info(
                self._name, revision=self._revision, timeout=self._timeout, expand=["sha"]
            )
            self._revision = about.sha
            found = self._list()
        except (HfHubHTTPError, httpx2.HTTPError) as error:
            raise self._refusal(error) from error
        if not found:
            raise InputError(f"{self.url} holds no files below {self._prefix or '/'!r}")
        return found

    def reader(self, threads: Executor) -> BlockingReader:
        """A reader; all share the library's pool of connections."""
        return BlockingReader(self._open, threads)

    def _list(self) -> Listing:
        from huggingface_hub import RepoFile

        found, start = Listing(), len(self._prefix)
        tree = self._api.list_repo_tree(
            self._name,
            self._prefix.rstrip("/") or None,
            recursive=True,
            revision=self._revision,
            repo_type="dataset",
        )
        for number, item in enumerate(tree):
            if isinstance(item, RepoFile) and item.path != _GITS_OWN:
                tag = item.lfs.sha256 if item.lfs else item.blob_id
                found.add(item.path[start:], item.size, 0, tag=tag)
            if number % _PAGE == 0:
                check_end(self.url, number // _PAGE, found)
        return found

    def _open(self, entry: Entry, offset: int) -> Stream:
        return _HubStream(self._blocks(entry), entry)

    def _blocks(self, entry: Entry) -> Iterator[bytes]:
        """The body, from where the hub sends us; the token stays with the hub."""
        import httpx2
        from huggingface_hub import get_session, hf_hub_url

        url = hf_hub_url(
            self._name,
            f"{self._prefix}{entry.name}",
            repo_type="dataset",
            revision=self._revision,
            endpoint=self._api.endpoint,
        )
        # Stored bytes, not some that are compressed for the way.
        headers = {**self._api._build_hf_headers(), "Accept-Encoding": "identity"}
        try:
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=self._timeout
            ) as answer:
                self._check(answer, entry)
                yield from answer.iter_raw(_BLOCK)
        except (httpx2.HTTPError, OSError) as error:
            raise Transient(f"{type(error).__name__}: {_line(error)}") from error

    def _check(self, answer: Any, entry: Entry) -> None:
        """Raise what a status other than 200 means."""
        if answer.status_code == 404:
            raise Changed(entry.name)
        if answer.status_code in (401, 403):
            raise InputError(
                f"cannot read {entry.name!r} of {self.url}: HTTP {answer.status_code}; accept its "
                "terms on its page and give HF_TOKEN"
            )
        if answer.status_code != 200:
            raise Transient(f"HTTP {answer.status_code}")

    def _refusal(self, error: Exception) -> KfpDdpError:
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        if isinstance(error, GatedRepoError):
            return InputError(
                f"{self.url} is gated: accept its terms on its page and give HF_TOKEN"
            )
        if isinstance(error, RepositoryNotFoundError):
            return InputError(
                f"there is no dataset {self._name} on {self._api.endpoint}, or it is private: "
                "correct the name, or give HF_TOKEN"
            )
        if isinstance(error, RevisionNotFoundError):
            return InputError(
                f"dataset {self._name} has no revision {self._revision!r}: give a branch or tag"
            )
        if isinstance(error, EntryNotFoundError):
            return InputError(
                f"dataset {self._name} has no folder {self._prefix!r}; check the path"
            )
        answer = getattr(error, "response", None)
        temporary = answer is None or is_temporary(answer.status_code)
        return (UnavailableError if temporary else InputError)(
            f"cannot list {self.url}: {_line(error)}; check the network and HF_ENDPOINT"
        )


class _HubStream:
    """A stream that ends with the check of its digest: SHA-256, or git's SHA-1."""

    def __init__(self, blocks: Iterator[bytes], entry: Entry) -> None:
        self._blocks, self._wanted = blocks, entry.tag
        if len(entry.tag) == 64:
            self._state = hashlib.sha256()
        else:
            self._state = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)

    def read(self, size: int = -1, /) -> bytes:
        """A block as the hub sends it, whatever `size` is."""
        block = next(self._blocks, b"")
        self._state.update(block)
        if not block and self._state.hexdigest() != self._wanted:
            found = f"{self._state.name.upper()} {self._state.hexdigest()}"
            raise Transient(f"{found} instead of {self._wanted}")
        return block

    def close(self) -> None:
        """Give the connection up, read or not."""
        self._blocks.close()  # type: ignore[attr-defined]


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _bound_pages() -> None:
    """Let the library hold at most a page of what the hub's API says; it bounds nothing itself."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks
    if _hold not in hooks["response"]:
        get_session().event_hooks = {**hooks, "response": [*hooks["response"], _hold]}


def _hold(answer: Any) -> None:
    if str(answer.request.url).startswith(f"{_hub().endpoint}/api/"):
        answer._content = held(answer.iter_bytes(_BLOCK), MAX_PAGE, answer.request.url.host)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
