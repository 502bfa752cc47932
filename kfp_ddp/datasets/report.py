"""Report of a sync: a line for the log, Markdown for the pipeline's UI."""

from typing import TYPE_CHECKING

from kfp_ddp.core.text import cell, code, human, printable
from kfp_ddp.datasets.context import Result

if TYPE_CHECKING:
    from kfp_ddp.datasets.images import Images

_SHOWN = 20
_CLASSES = 200


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
    return f"{text}; no old version was removed: {result.kept_why}" if result.kept_why else text


def table(result: Result) -> list[str]:
    """Return the plan of a dry run, one line per file: action, size in bytes, name."""
    listing, changes = result.names.listing, result.changes
    lines = [f"{'action':8} {'bytes':>14}  name"]
    for action, indices in (("add", changes.added), ("replace", changes.changed)):
        lines += [
            f"{action:8} {listing.sizes[i]:>14,}  {printable(listing.names[i])}" for i in indices
        ]
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
        ("Old versions removed", _removed(result)),
    ]
    text = ["# Data sync", "", "| | |", "|---|---|"]
    text += [f"| {name} | {value} |" for name, value in facts]
    text += _images(result.images) if result.images else []
    listing = result.names.listing
    for title, entries in (
        ("Added", [listing.names[i] for i in changes.added]),
        ("Changed", [listing.names[i] for i in changes.changed]),
        ("Removed", changes.removed),
        ("Skipped", [f"{name!r}: {reason}" for name, reason in result.names.skipped]),
        ("Renamed", [f"{old!r} is {new!r}" for old, new in result.names.encoded.items()]),
    ):
        if entries:
            text += ["", f"## {title}: {len(entries):,}", ""]
            text += [f"- `{code(name)}`" for name in entries[:_SHOWN]]
            text += [f"- and {len(entries) - _SHOWN:,} more"] if len(entries) > _SHOWN else []
    return "\n".join(text) + "\n"


def _images(images: "Images") -> list[str]:
    """Return the lines about images, with the counts of each class."""
    layout, number = images.layout, len(images.layout.classes)
    total = sum(len(part) for part in layout.parts.values())
    lines = [
        "",
        f"## Images: {total:,} in {number:,} classes",
        "",
        f"From {cell(layout.form)}.",
        "",
    ]
    lines += [f"- {cell(warning)}" for warning in images.warnings]
    lines += ["", f"| class | {' | '.join(layout.parts)} |", "|---|---|---|---|"]
    columns = [part.counts(number) for part in layout.parts.values()]
    rows = list(zip(layout.classes, *columns, strict=True))
    lines += [f"| {cell(name)} | {a:,} | {b:,} | {c:,} |" for name, a, b, c in rows[:_CLASSES]]
    lines += [f"| and {number - _CLASSES:,} more | | | |"] if number > _CLASSES else []
    return lines


def _outcome(result: Result) -> str:
    if result.planned:
        refusal = f"; would be refused: {cell(result.refusal)}" if result.refusal else ""
        return f"dry run, nothing written{refusal}"
    if result.unchanged:
        return "unchanged, nothing copied"
    return f"{result.repaired:,} damaged files repaired" if result.repaired else "new version"


def _removed(result: Result) -> str:
    if result.kept_why:
        return f"none, though there are: {cell(result.kept_why)}"
    return ", ".join(f"`{version}`" for version in result.removed_versions) or "none"
