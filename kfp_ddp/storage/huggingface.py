"""A dataset on the Hugging Face Hub at one commit: hf://datasets/owner/name@revision/folder."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import IO, Any
from urllib.parse import quote, urlsplit

import httpx2
from huggingface_hub import HfApi, HfFileSystem, get_session, hf_hub_url, utils
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kfp_ddp.core.errors import InputError, KfpDdpError, writing
from kfp_ddp.core.machine import require
from kfp_ddp.core.text import one_line
from kfp_ddp.storage import event_loop, store
from kfp_ddp.storage.http.answer import Response
from kfp_ddp.storage.http.client import Checksum, HttpReader, HttpSource, sha256_checksum
from kfp_ddp.storage.http.origin import Origin, Request, quoted, target_of
from kfp_ddp.storage.listing import Listing
from kfp_ddp.storage.parquet_rows import (
    FILES,
    CopiedRows,
    ParquetRows,
    RemoteRows,
    Shard,
    check_configurations,
    columns_of,
    nameless_file,
    parquet_file,
    shards_in,
    suffix_of,
)
from kfp_ddp.storage.source import (
    Entry,
    Pages,
    Reader,
    Retry,
    SourceOptions,
    Transient,
    check_not_empty,
    is_temporary,
    reading_pages,
)
from kfp_ddp.storage.store import read_bounded

_URL = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.*))?"
)
_BLOCK = 1 << 20
MAX_PAGE = 1 << 24
"""Bytes of a page: 1,000 paths of 2,048 characters, each six times as long when JSON escapes it."""
_ATTRIBUTES = ".gitattributes"
_COMMIT = re.compile("[0-9a-f]{40}")
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class HuggingFaceSource(HttpSource):
    """The files of a dataset at a commit; HF_ENDPOINT applies, and HF_TOKEN for the hub alone."""

    max_workers = 32
    advice = "accept its terms on its page and give HF_TOKEN"

    def __init__(self, url: str, options: SourceOptions) -> None:
        self._api = _hub()
        parts = _URL.fullmatch(url)
        if parts is None:
            raise InputError(
                f"source {url!r} is not a dataset of the hub: write hf://datasets/owner/name, with "
                "@revision after the name and /folder at the end where you need them"
            )
        super().__init__(url, Origin.of(self._api.endpoint), options.timeout)
        self._name = parts["name"]
        self._revision = parts["revision"]
        folder = (parts["folder"] or "").strip("/")
        self._prefix = f"{folder}/" if folder else ""
        self._options = options
        self._rows: ParquetRows | None = None

    def listing(self) -> Listing:
        """List the folder at the revision's commit; see `Source.listing`."""
        try:
            _bound_pages()
            with reading_pages(self.url):
                about = self._api.dataset_info(
                    self._name, revision=self._revision, timeout=self.pool.timeout, expand=["sha"]
                )
                if not _COMMIT.fullmatch(about.sha):
                    raise ValueError(f"{about.sha!r} is no commit")
                self._revision = about.sha
                listing = self._list()
        except (HfHubHTTPError, httpx2.HTTPError) as error:
            raise self._problem(error) from error
        check_not_empty(self.url, self._prefix, listing)
        address = hf_hub_url(
            self._name,
            f"{self._prefix}x",
            repo_type="dataset",
            revision=self._revision,
            endpoint=self._api.endpoint,
        ).removesuffix("x")
        self._path = target_of(urlsplit(address))
        shards = shards_in(listing)
        if not shards or self._options.label_column == FILES:
            return listing
        return self._pictures_in(shards) or listing

    def reader(self, threads: Executor | None) -> Reader:
        """Return a reader of files, or of the pictures in them; see `Source.reader`."""
        return self._rows.reader(threads) if self._rows else super().reader(threads)

    def request(self, entry: Entry, offset: int) -> Request:
        """Ask for stored bytes, not for compressed ones; see `HttpSource.request`."""
        target = self._path + quoted(entry.name)
        headers = b"Accept-Encoding: identity\r\n"
        return Request(self.origin, target, entry.size, headers, self.secret)

    def _renew(self, refused: bool) -> None:
        headers = utils.build_hf_headers()  # type: ignore[attr-defined]
        lines = (f"{name}: {value}\r\n" for name, value in headers.items())
        self.secret = "".join(lines).encode()

    def checksum(self, entry: Entry, answer: Response) -> Checksum | None:
        """Return the digest of the listing: SHA-256, or git's SHA-1."""
        if len(entry.tag) == 64:
            return sha256_checksum(entry.tag.encode())
        state = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)
        return Checksum("SHA1", state, bytes.fromhex(entry.tag))

    def _list(self) -> Listing:
        listing = Listing(lists_crc=False)
        pages = Pages(self.url, self._prefix)
        for page in self._pages(pages):
            for item in page:
                if item["type"] == "file" and item["path"] != _ATTRIBUTES:
                    name, size = pages.row(item["path"], item["size"])
                    tag = (item.get("lfs") or item)["oid"]
                    if not _DIGEST.fullmatch(tag):
                        raise ValueError(f"{name!r} has no valid digest")
                    listing.add(name, size, 0, tag=tag)
        return listing

    def _pages(self, pages: Pages) -> Iterator[list[dict[str, Any]]]:
        """Yield the pages of the listing; of the address of the next, only the query is used."""
        sdk: Any = utils  # which exports these without a type
        folder = f"/{quote(self._prefix[:-1], safe='')}" if self._prefix else ""
        path = f"{self._api.endpoint}/api/datasets/{self._name}/tree/{self._revision}{folder}"
        query = "recursive=true"
        while query:
            answer = sdk.http_backoff("GET", f"{path}?{query}", headers=sdk.build_hf_headers())
            sdk.hf_raise_for_status(answer)
            yield answer.json()
            query = pages.following(urlsplit(answer.links.get("next", {}).get("url", "")).query)

    def _pictures_in(self, shards: list[Shard]) -> Listing | None:
        """Return the pictures in Parquet files; None if there are none."""
        require("parquet", f"{self.url}, a dataset in Parquet files,")
        with self._remote(shards[0]) as file, reading_pages(self.url):
            parquet = parquet_file(file)
            columns = columns_of(self.url, parquet.schema_arrow, self._options.label_column)
            if columns is None:
                return None
            suffix = suffix_of(parquet, columns)
        check_configurations(self.url, shards)
        if self._options.copies:
            copied = self._copied
            self._rows = CopiedRows(shards, columns, suffix, copied, folder=self._options.copies)
        else:
            self._rows = RemoteRows(shards, columns, suffix, self._remote)
        with reading_pages(self.url):
            return self._rows.listing()

    def _remote(self, shard: Shard) -> IO[bytes]:
        """Open a file of the dataset; each read is a request."""
        files = HfFileSystem(endpoint=self._api.endpoint)
        path = f"datasets/{self._name}@{self._revision}/{self._prefix}{shard.name}"
        file: IO[bytes] = files.open(path, "rb", cache_type="none")
        return file

    def _copied(self, shard: Shard) -> IO[bytes]:
        """Download a file, verified, to one without a name."""
        folder = self._options.copies
        entry = Entry(shard.name, 0, shard.tag, shard.size)
        file = nameless_file(folder)

        def take(block: bytes) -> None:
            with writing(folder):
                file.write(block)

        async def attempt() -> None:
            file.seek(0)
            file.truncate()
            reader = HttpReader(self, None)
            try:
                await reader.pour(entry, 0, take)
            finally:
                reader.close()
            if file.tell() != shard.size:
                raise Transient(f"{file.tell()} bytes instead of {shard.size}")

        with contextlib.ExitStack() as closing:
            closing.enter_context(file)
            event_loop.run(Retry().call("read", f"{shard.name!r} of {self.url}", attempt))
            closing.pop_all()
        return file

    def _problem(self, error: Exception) -> KfpDdpError:
        if isinstance(error, GatedRepoError):
            return InputError(f"{self.url} is gated: {self.advice}")
        if isinstance(error, RepositoryNotFoundError):
            return InputError(
                f"dataset {self._name} does not exist on {self._api.endpoint}, or is private: "
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
        status = answer.status_code if answer is not None else None
        advice = "check the network and HF_ENDPOINT"
        temporary = status is None or is_temporary(status)
        return store.failed("list", self.url, one_line(error), advice, temporary=temporary)


def _hub() -> Any:
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _bound_pages() -> None:
    """Bound the responses of the hub's API, which the library does not."""
    hooks = get_session().event_hooks
    if _bound not in hooks["response"]:
        get_session().event_hooks = {**hooks, "response": [*hooks["response"], _bound]}


def _bound(answer: Any) -> None:
    if str(answer.request.url).startswith(f"{_hub().endpoint}/api/"):
        answer._content = read_bounded(answer.iter_bytes(_BLOCK), MAX_PAGE, answer.request.url.host)
