"""Options of a sync, a dataclass as importing pydantic takes 0.2 s, and the name of its dataset."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kfp_ddp.core.config import setting
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import path_of
from kfp_ddp.core.spreadsheet import Reader

NAME = "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"
NAME_DESCRIPTION = (
    "at most 40 lower-case letters, digits and dashes, as it becomes part of a claim's name"
)

MOST_ROWS = 1000
"""Maximum rows of a table of names, which a run on KFP has in its parameters: about 50 kB."""
_TABLE = re.compile(r"@.*\.(csv|tsv|txt|jsonl?|xlsx?)", re.IGNORECASE)


@dataclass(frozen=True)
class SyncOptions:
    """Options of a sync; the component and the command line are made from it."""

    dataset: str = setting(
        "",
        "Name of the dataset, at most 40 lower-case letters, digits and dashes; empty for the last "
        "part of the source with a hash of it.",
    )
    include: tuple[str, ...] = setting(
        (),
        "Globs of the names to take, all without a value. * stops at a slash, ** does not; a "
        "pattern without a slash is matched with the last segment.",
    )
    exclude: tuple[str, ...] = setting(
        (),
        "Globs of the names to leave out; @FILE.csv for the names in the column path of a table of "
        "this machine, such as @labels_to_check.csv.",
    )
    hostile_names: Literal["error", "skip", "encode"] = setting(
        "error", "What to do with names that cannot be files."
    )
    symlinks: Literal["error", "skip", "follow"] = setting(
        "error", "What to do with symbolic links in a source folder."
    )
    verify: Literal["list", "quick", "full"] = setting(
        "list",
        "How to check existing files: list trusts them, quick compares sizes and times, full reads "
        "every byte, also of files that a new version reuses. Damaged files are downloaded again.",
    )
    pack: Literal["none", "tar"] = setting(
        "none",
        "tar packs a version into archives of about 256 MB, members sorted by name, which training "
        "reads in large pieces: for storage that is slow with small files.",
    )
    max_delete: float = setting(
        0.5, "Refuse to lose more than this share of the files.", ge=0, le=1
    )
    max_object_mb: float = setting(
        0.0, "Refuse objects larger than this many megabytes; 0 for any size.", ge=0
    )
    dry_run: bool = setting(
        False, "Only report what a run would do, or be refused for; write nothing."
    )
    concurrency: int = setting(64, "Most connections at once.", ge=1, le=1024)
    bandwidth_mb: float = setting(
        0.0, "Largest rate in megabytes per second; 0 for no limit.", ge=0
    )
    keep_versions: int = setting(
        3, "Versions of this dataset to keep, the new one included; 0 for all.", ge=0
    )
    keep_hours: float = setting(
        168.0,
        "Also keep versions that a sync handed out within this number of hours, for readers "
        "without a lease: a run that is retried later, and readers of what the command line wrote.",
        ge=0,
    )
    lock_wait: int = setting(
        86400,
        "Seconds to wait for another sync of the same folder, which may be the first of a large "
        "dataset. An existing version does not wait.",
        ge=0,
    )
    timeout: float = setting(30.0, "Read timeout in seconds.", ge=0.01)
    requester_pays: str = setting(
        "",
        "For a bucket whose requester pays: the project that pays for gs://, or requester for "
        "s3://, where the account of the credentials pays.",
    )
    label_column: str = setting(
        "",
        "Of a dataset of the hub in Parquet files with pictures: the column of their classes, "
        "empty for the only one. Each picture becomes a file in the folder of its class; none "
        "copies the Parquet files as they are.",
    )

    @property
    def layout(self) -> str:
        """Return what a version's digest tells of its files; '' for one file for each object."""
        return "" if self.pack == "none" else self.pack


def glob_of(name: str) -> str:
    """Return a glob of this name alone."""
    return "/" + re.sub(r"([*?]|(?<=\\)\s|\s(?=\s*\Z))", r"\\\1", name)


def below(source: str, globs: Iterable[str]) -> tuple[str, ...]:
    """Return globs with absolute paths below a source as names in it."""
    start = glob_of(canonical(source))
    return tuple(glob.removeprefix(start).removeprefix(start[1:]) for glob in globs)


def expanded(globs: Iterable[str]) -> tuple[str, ...]:
    """Return globs with the names of a table in place of `@FILE.csv`; raise InputError."""
    names = (_names(glob[1:]) if _TABLE.fullmatch(glob) else [glob] for glob in globs)
    return tuple(itertools.chain.from_iterable(names))


def _names(table: str) -> list[str]:
    """Return the names in a table as globs from the root of the source."""
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            reader = Reader(file)
            if "path" not in reader.columns:
                raise ValueError("no column 'path'")
            names = (row["path"] for row in reader)
            rows = [glob_of(name) for name in names if name]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise InputError(
            f"@{table} cannot be read ({why}): give a CSV of this machine with a column "
            "path, such as labels_to_check.csv"
        ) from None
    if len(rows) > MOST_ROWS:
        raise InputError(
            f"@{table} has {len(rows):,} rows, but a run takes {MOST_ROWS:,}: check them, "
            "and keep those to leave out"
        )
    return rows


def dataset_name(dataset: str, source: str) -> str:
    """Return the given name, or one from the address; InputError if no claim can have it."""
    if not dataset and source:
        address = canonical(source)
        parts = re.sub(r"/[^/]+\.jsonl$", "", address.lower()).split("/")
        word = re.sub("[^a-z0-9]+", "-", parts[-1]).strip("-")[:33].strip("-")
        return f"{word or 'data'}-{hashlib.sha256(address.encode()).hexdigest()[:6]}"
    if not re.fullmatch(NAME, dataset):
        raise InputError(f"dataset is {dataset!r}; give {NAME_DESCRIPTION}")
    return dataset


def canonical(source: str) -> str:
    """Return the canonical form of a source: absolute, without final slash, query and login."""
    if not source:
        return ""
    scheme, mark, rest = source.partition("://")
    if scheme in ("http", "https"):
        server, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
        return f"{scheme}://{server.rpartition('@')[2]}{slash}{path}".rstrip("/")
    if mark and scheme != "file":
        return source.rstrip("/")
    return os.path.abspath(path_of(source))
