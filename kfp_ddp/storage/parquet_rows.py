"""Pictures in the rows of Parquet files, as most datasets of the Hugging Face Hub hold them.

A row is the file `<split>/<class>/<file>-<row>.<suffix>`. Its class is in the label column, its
split in the name of the Parquet file.
"""

import hashlib
import json
import os
import re
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import lru_cache
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError, writing
from kfp_ddp.core.log import log
from kfp_ddp.core.text import plural
from kfp_ddp.pictures.reading import is_image
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.folder_source import FolderReader
from kfp_ddp.storage.listing import Listing, token_of
from kfp_ddp.storage.source import Entry

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetFile

FILES = "none"
"""Label column that keeps the Parquet files as they are."""
_ABOUT = (".md", ".txt", ".json", ".yaml", ".yml", ".py", ".gitignore")
"""Suffixes of the files that describe a dataset."""
_LABELS = ("label", "labels", "class", "category", "target")
"""Columns of classes in files that `datasets` did not write."""
_PART = re.compile(r"-\d+-of-\d+.*")
_SPLIT = re.compile("train|val|dev|test|eval")
"""Words by which the hub knows the split of a file."""
_AT_ONCE = 4
"""Parquet files that are read at the same time."""
_BATCH = 64
_CHUNK = 1 << 20
_PNG = b"\x89PNG"
_SIZE = 8
"""Bytes for the size of a copy."""
_GROUPS = 48
"""Bits of a pin below the number of the file: a group and a row of it."""
_ROWS = 24
"""Bits of these for the row."""
_LARGEST_GUESS = 1 << 20
"""A transfer would read a larger picture in parts."""


class Shard(NamedTuple):
    """A Parquet file: its name, its bytes and what identifies its content."""

    name: str
    size: int
    tag: str

    @property
    def split(self) -> str:
        """Return the folder of its pictures; '' where its name has no split."""
        path = PurePosixPath(self.name)
        word = path.parent.name if path.stem.isdigit() else _PART.sub("", path.stem)
        return word if _SPLIT.search(word) else ""

    @property
    def configuration(self) -> str:
        """Return the folder above the splits."""
        folder = PurePosixPath(self.name).parent
        return str(folder.parent if folder.name == self.split else folder)


class Columns(NamedTuple):
    """The columns of a dataset of classified pictures."""

    image: str
    label: str
    classes: Sequence[str]
    """Names of the classes, where a label is a number."""

    def class_of(self, label: Any) -> str:
        """Return the folder of a label; '' for a row without a class."""
        if self.classes and label is not None:
            # The hub writes -1 for an unknown class.
            label = self.classes[label] if label in range(len(self.classes)) else None
        return "" if label is None else str(label).replace("/", "%2F")


class Place(NamedTuple):
    """Where a row is: its file and group, its number in the group and in the file."""

    shard: int
    group: int
    member: int
    row: int
    average: int
    """Bytes of a picture of the group, about."""


def shards_in(listing: Listing) -> list[Shard]:
    """Return the Parquet files of a dataset that has no other data; [] for another one."""
    rows = zip(listing.names, listing.sizes, listing.tags, strict=True)
    data = sorted(Shard(*row) for row in rows if not row[0].lower().endswith(_ABOUT))
    return data if all(shard.name.endswith(".parquet") for shard in data) else []


def check_configurations(url: str, shards: Sequence[Shard]) -> None:
    """Raise InputError for a dataset in several forms, which have the same pictures."""
    names = sorted({shard.configuration for shard in shards})
    if len(names) > 1:
        raise InputError(
            f"{url} has several configurations ({', '.join(names[:5])}): add the folder of one, "
            f"as in {url}/{names[0]}"
        )


def columns_of(url: str, schema: "Schema", label_column: str) -> Columns | None:
    """Return the columns of the pictures and their classes; None without pictures."""
    about = (schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(about).get("info", {}).get("features", {})
    images = [name for name in schema.names if _has_pictures(schema, name)]
    if not images:
        return None
    labels = [name for name in schema.names if _type_of(features, name) == "ClassLabel"]
    if not labels:
        labels = [name for name in schema.names if name.lower() in _LABELS]
    if label_column:
        labels = [name for name in schema.names if name == label_column]
    if len(images) != 1 or len(labels) != 1:
        raise InputError(
            f"{url} has Parquet files with the columns {', '.join(schema.names)}, of which "
            f"{len(images)} have pictures and {len(labels)} can be the class: give "
            f"sync.label_column, or {FILES} to copy the files as they are"
        )
    classes = features.get(labels[0], {}).get("names", ())
    return Columns(images[0], labels[0], classes)


def _type_of(features: Mapping[str, Any], name: str) -> str:
    feature = features.get(name)
    return feature.get("_type", "") if isinstance(feature, Mapping) else ""


def _has_pictures(schema: "Schema", name: str) -> bool:
    """Return whether a column has encoded pictures, as `datasets` writes them."""
    import pyarrow.types as kinds

    kind = schema.field(name).type
    return bool(kinds.is_struct(kind)) and kind.get_field_index("bytes") >= 0


class ParquetRows(ABC):
    """The pictures in the rows of Parquet files; their `Source` hands out listing and reader."""

    sized: bool
    read: tuple[str, ...]
    """What a listing reads of each picture."""

    def __init__(
        self,
        shards: Sequence[Shard],
        columns: Columns,
        suffix: str,
        opened: Callable[[Shard], IO[bytes]],
    ) -> None:
        """`opened` opens a file for reads at any place; `suffix`: of a picture without a name."""
        self.shards = shards
        self.columns = columns
        self.opened = opened
        self._suffix = suffix

    def listing(self) -> Listing:
        """Return the pictures of all rows that have one and a class."""
        whole = Listing(lists_crc=False, sized=self.sized)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for part in threads.map(self._list, range(len(self.shards))):
                whole.extend(part)
        return whole.sorted()

    @abstractmethod
    def reader(self, threads: Executor | None) -> FolderReader:
        """Return a reader of the listed pictures."""

    @abstractmethod
    def add(self, listing: Listing, name: str, place: Place, picture: Mapping[str, Any]) -> None:
        """Add a picture to a listing."""

    def _list(self, number: int) -> Listing:
        listing = Listing(lists_crc=False)
        shard = self.shards[number]
        with self.opened(shard) as file:
            parquet = parquet_file(file)
            for place, row in _rows(parquet, number, self.columns, self.read):
                picture = row[self.columns.image] or {"bytes": None}
                folder = self.columns.class_of(row[self.columns.label])
                if folder and picture.get("bytes", b"") is not None:
                    self.add(listing, self._name(shard, folder, place, picture), place, picture)
            without = parquet.metadata.num_rows - len(listing)
        if without:
            log.info(f"{shard.name}: {plural(without, 'row')} without a picture or class left out")
        return listing

    def _name(self, shard: Shard, folder: str, place: Place, picture: Mapping[str, Any]) -> str:
        path = picture["path"] or ""
        suffix = PurePosixPath(path).suffix if is_image(path) else self._suffix
        stem = PurePosixPath(shard.name).stem
        return str(PurePosixPath(shard.split, folder, f"{stem}-{place.row:07}{suffix}"))


class CopiedRows(ParquetRows):
    """Pictures that the listing copies to a file without a name, which ends with this process."""

    sized = True
    read = ("bytes", "path")

    def __init__(self, *arguments: Any, folder: str) -> None:
        """`folder`: with room for all pictures."""
        super().__init__(*arguments)
        self._folder = folder
        self._file = nameless_file(folder)
        weakref.finalize(self, self._file.close)  # a source has no end of its own
        self._lock = threading.Lock()

    def add(self, listing: Listing, name: str, place: Place, picture: Mapping[str, Any]) -> None:
        """Copy the picture behind its size; its content identifies it."""
        content: bytes = picture["bytes"]
        size = len(content).to_bytes(_SIZE, "big")
        with self._lock, writing(self._folder):
            pin = self._file.tell()
            self._file.write(size + content)
        listing.add(name, len(content), 0, pin, token_of(hashlib.sha256(content)))

    def reader(self, threads: Executor | None) -> FolderReader:
        """Return a reader of the copies."""
        with writing(self._folder):
            self._file.flush()
        return FolderReader(self, threads)

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield a copy from an offset on."""
        file = self._file.fileno()
        start = pin + _SIZE
        end = start + int.from_bytes(os.pread(file, _SIZE, pin), "big")
        for place in range(start + offset, end, _CHUNK):
            yield os.pread(file, min(_CHUNK, end - place), place)


class RemoteRows(ParquetRows):
    """Pictures of which a listing reads the labels alone: each size is an average."""

    sized = False
    read = ("path",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._group = lru_cache(2)(self._read_group)

    def add(self, listing: Listing, name: str, place: Place, picture: Mapping[str, Any]) -> None:
        """Add the picture, which its row identifies."""
        tag = f"{self.shards[place.shard].tag}-{place.row}"
        pin = (place.shard << _GROUPS) + (place.group << _ROWS) + place.member
        listing.add(name, place.average, 0, pin, tag)

    def reader(self, threads: Executor | None) -> FolderReader:
        """Return a reader of the rows."""
        return _RowReader(self, threads)

    def picture(self, pin: int) -> bytes:
        """Return the picture of a row."""
        shard, place = divmod(pin, 1 << _GROUPS)
        group, member = divmod(place, 1 << _ROWS)
        with self._lock:  # the next row is often of the same group
            picture: bytes = self._group(shard, group)[member]
        return picture

    def blocks(self, name: str, pin: int, offset: int) -> Iterator[bytes]:
        """Yield the picture from an offset on."""
        yield self.picture(pin)[offset:]

    def _read_group(self, shard: int, group: int) -> list[bytes]:
        column = f"{self.columns.image}.bytes"
        with self.opened(self.shards[shard]) as file:
            table = parquet_file(file).read_row_group(group, columns=[column])
        return [row["bytes"] for row in table.column(self.columns.image).to_pylist()]


class _RowReader(FolderReader):
    """Reads pictures whose listed sizes are averages."""

    def __init__(self, rows: RemoteRows, threads: Executor | None) -> None:
        super().__init__(rows, threads)
        self._rows = rows

    async def read(self, entry: Entry) -> bytes:
        """See `Reader.read`."""
        return await event_loop.in_thread(self._threads, self._rows.picture, entry.generation)


def nameless_file(folder: str) -> IO[bytes]:
    """Return a file that ends with its last descriptor, so that nothing is left behind."""
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)


def parquet_file(file: IO[bytes]) -> "ParquetFile":
    """Open a file; only few syncs need the library, which takes 0.1 s to import."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file)


def suffix_of(parquet: "ParquetFile", columns: Columns) -> str:
    """Return the suffix of the first picture, for all that have no name."""
    pictures = (row[columns.image] for _, row in _rows(parquet, 0, columns, ("bytes",)))
    first: Mapping[str, Any] = next(filter(None, pictures), {})
    content = first.get("bytes") or b""
    return ".png" if content.startswith(_PNG) else ".jpg"


def _rows(
    parquet: "ParquetFile", number: int, columns: Columns, parts: Sequence[str]
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the rows of a file with the label and these parts of the picture."""
    wanted = [columns.label, *(f"{columns.image}.{part}" for part in parts)]
    row = 0
    for group in range(parquet.num_row_groups):
        size = parquet.metadata.row_group(group)
        average = min(size.total_byte_size // max(size.num_rows, 1), _LARGEST_GUESS)
        first = row
        for batch in parquet.iter_batches(_BATCH, row_groups=[group], columns=wanted):
            for values in batch.to_pylist():
                yield Place(number, group, row - first, row, average), values
                row += 1
