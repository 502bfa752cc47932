"""Progress, result and report of a sync."""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kfp_ddp.core.text import bar, cell, code, human, printable
from kfp_ddp.datasets.context import SyncCounters
from kfp_ddp.datasets.names import Names
from kfp_ddp.storage.manifest import Changes

if TYPE_CHECKING:
    from kfp_ddp.datasets.images import DatasetImages

_BAR = 24
_CLEAR = "\r\033[K"
_SHOWN = 20
_CLASSES = 200


@dataclass(frozen=True)
class Result:
    """What a sync downloads to and what it did; each phase returns a new one. Sizes in bytes."""

    source: str
    dataset: str
    digest: str
    path: Path
    names: Names
    exact: str = ""
    """Digest of the listing, which that of a version of an earlier release differs from."""
    unconfirmed: bool = False
    """Whether only crc32c says that this version is the listing."""
    images: "DatasetImages | None" = None
    """The images to train on, if they were checked."""
    changes: Changes = field(default_factory=Changes)
    unchanged: bool = False
    planned: bool = False
    """A dry run: nothing was written."""
    refusal: str = ""
    """Of a dry run: why the sync would fail before the first byte."""
    downloaded: int = 0
    downloaded_bytes: int = 0
    linked: int = 0
    resumed: int = 0
    repaired: int = 0
    retries: int = 0
    removed_versions: tuple[str, ...] = ()
    kept_why: str = ""
    """Why no old version could be removed, other than that they are in use."""
    seconds: float = 0.0

    @property
    def files(self) -> int:
        """Return the number of objects in the target."""
        return len(self.names.listing)

    @property
    def bytes(self) -> int:
        """Return the size of all objects in the target."""
        return self.names.listing.bytes


class SyncProgress:
    """Prints the phases of a sync and its progress until the block ends."""

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = self._stream.isatty() and not quiet
        self._every = 0.2 if self._live else 10.0
        self._meter: SyncCounters | None = None
        self._files = 0
        self._bytes = 0
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> "SyncProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._live:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def watch(self, phase: str, meter: SyncCounters | None, files: int, size: int) -> None:
        """Start a phase; a download has a meter."""
        self._files = files
        self._bytes = size
        self._meter = meter
        self._began = time.monotonic()
        if meter is None:
            self._write(phase)
        elif files:
            self._write(f"{phase} {files:,} files, {human(size)}")

    def _loop(self) -> None:
        while not self._stop.wait(self._every):
            if self._meter is not None and self._files:
                self._write(self.line(self._meter))

    def line(self, meter: SyncCounters) -> str:
        """Return a line with progress, rate and remaining time."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        # Retried bodies count twice in bytes, and large files hardly count in files.
        share = max(meter.files / self._files, meter.bytes / max(self._bytes, 1))
        share = min(share, 1.0 if meter.files == self._files else 0.99)
        rate = meter.bytes / seconds
        left = seconds / share - seconds if share > 0 else 0.0
        retries = f", {meter.retries} retries" if meter.retries else ""
        return (
            f"{bar(share, _BAR)} {share:4.0%}  {meter.files:,}/{self._files:,} files"
            f"  {human(meter.bytes)}  {human(rate)}/s  {left:.0f} s left{retries}"
        )

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        self._stream.write(f"{_CLEAR}{text}" if self._live else f"{text}\n")
        self._stream.flush()


def line(result: Result) -> str:
    """Return one line for logs and the terminal."""
    head = f"{printable(result.source)} is version {result.digest[:12]}: {result.files:,} files, "
    head += human(result.bytes)
    if result.names.skipped:
        head += f", {len(result.names.skipped):,} left out"
    if result.planned:
        return f"{head}; dry run, nothing written ({result.seconds:.2f} s)"
    if result.unchanged:
        return f"{head}; unchanged, nothing copied ({result.seconds:.2f} s)"
    rate = result.downloaded_bytes / max(result.seconds, 1e-3)
    text = (
        f"{head}; downloaded {result.downloaded:,} ({human(result.downloaded_bytes)}), linked "
        f"{result.linked:,}, resumed {result.resumed:,} in {result.seconds:.1f} s, {human(rate)}/s"
    )
    if result.kept_why:
        text += f"; no old version was removed: {result.kept_why}"
    return text


def table(result: Result) -> list[str]:
    """Return the plan of a dry run, one line per file: action, size in bytes, name."""
    listing = result.names.listing
    changes = result.changes
    lines = [f"{'action':8} {'bytes':>14}  name"]
    for action, indices in (("add", changes.added), ("replace", changes.changed)):
        for index in indices:
            name = printable(listing.names[index])
            lines.append(f"{action:8} {listing.sizes[index]:>14,}  {name}")
    lines += [f"{'delete':8} {'':>14}  {printable(name)}" for name in changes.removed]
    lines += [f"{'skip':8} {'':>14}  {name!r}: {why}" for name, why in result.names.skipped]
    lines.append(
        f"{len(changes.added):,} to add, {len(changes.changed):,} to replace, "
        f"{len(changes.removed):,} to delete, {len(changes.same):,} unchanged"
    )
    if result.refusal:
        lines.append(f"would be refused: {printable(result.refusal)}")
    return lines


def markdown(result: Result) -> str:
    """Return the report in Markdown."""
    changes = result.changes
    rate = result.downloaded_bytes / max(result.seconds, 1e-3)
    removed = ", ".join(f"`{version}`" for version in result.removed_versions) or "none"
    if result.kept_why:
        removed = f"none, though there are: {cell(result.kept_why)}"
    facts = [
        ("Source", cell(result.source)),
        ("Version", f"`{result.digest[:12]}`"),
        ("Digest", f"`{result.digest}`"),
        ("Path", cell(str(result.path))),
        ("Files", f"{result.files:,}"),
        ("Bytes", human(result.bytes)),
        ("Outcome", _outcome(result)),
        ("Downloaded", f"{result.downloaded:,} files, {human(result.downloaded_bytes)}"),
        ("Linked from the version before", f"{result.linked:,}"),
        ("Resumed from an interrupted run", f"{result.resumed:,}"),
        ("Retried requests", f"{result.retries:,}"),
        ("Seconds", f"{result.seconds:.2f} ({human(rate)}/s)"),
        ("Old versions removed", removed),
    ]
    text = ["# Data sync", "", "| | |", "|---|---|"]
    text += [f"| {name} | {value} |" for name, value in facts]
    if result.images:
        text += _images(result.images)
    listing = result.names.listing
    for title, entries in (
        ("Added", [listing.names[index] for index in changes.added]),
        ("Changed", [listing.names[index] for index in changes.changed]),
        ("Removed", changes.removed),
        ("Skipped", [f"{name!r}: {reason}" for name, reason in result.names.skipped]),
        ("Renamed", [f"{old!r} is {new!r}" for old, new in result.names.encoded.items()]),
    ):
        text += _section(title, entries)
    return "\n".join(text) + "\n"


def _section(title: str, entries: Sequence[str]) -> list[str]:
    """Return the lines of a list of files with its title; none without files."""
    if not entries:
        return []
    lines = ["", f"## {title}: {len(entries):,}", ""]
    lines += [f"- `{code(name)}`" for name in entries[:_SHOWN]]
    if len(entries) > _SHOWN:
        lines.append(f"- and {len(entries) - _SHOWN:,} more")
    return lines


def _images(images: "DatasetImages") -> list[str]:
    layout = images.layout
    number = len(layout.classes)
    total = sum(len(part) for part in layout.parts.values())
    title = f"## Images: {total:,} in {number:,} classes"
    lines = ["", title, "", f"From {cell(layout.form)}.", ""]
    lines += [f"- {cell(warning)}" for warning in images.warnings]
    lines += ["", f"| class | {' | '.join(layout.parts)} |", "|---|---|---|---|"]
    columns = [part.counts(number) for part in layout.parts.values()]
    rows = list(zip(layout.classes, *columns, strict=True))
    for name, train, val, test in rows[:_CLASSES]:
        lines.append(f"| {cell(name)} | {train:,} | {val:,} | {test:,} |")
    if number > _CLASSES:
        lines.append(f"| and {number - _CLASSES:,} more | | | |")
    return lines


def _outcome(result: Result) -> str:
    if result.planned:
        refusal = f"; would be refused: {cell(result.refusal)}" if result.refusal else ""
        return f"dry run, nothing written{refusal}"
    if result.unchanged:
        return "unchanged, nothing copied"
    if result.repaired:
        return f"{result.repaired:,} damaged files repaired"
    return "new version"
