"""The bundle of the model: its forms, how they agree, how fast they are."""

from collections.abc import Mapping
from html import escape
from typing import Any

from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures import is_number
from kfp_ddp.report.text import gained, table


def bundle(found: Material) -> str:
    """What was measured of the exported files; '' where none are at hand."""
    parts = [
        _forms(found.bundle.get("parity", {}), found.bundle.get("latency", {})),
        _variants(found.bundle.get("variants", {})),
        _infra(found.bundle.get("infra", {})),
    ]
    said = "".join(parts)
    return f"<h2>Exported model</h2>{said}" if said else ""


def _forms(parity: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    formats = parity.get("formats") or {}
    runtimes = latency.get("runtimes") or {}
    names = [*formats, *(name for name in runtimes if name not in formats)]
    if not names:
        return ""
    rows = []
    for name in names:
        agrees, fast = formats.get(name) or {}, runtimes.get(name) or {}
        times = [_number((fast.get(f"batch_{n}") or {}).get("median_ms"), ".3g") for n in (1, 8)]
        difference = _number(agrees.get("max_abs_difference"), ".2g")
        same = _number(agrees.get("same_top1"), ".1%")
        rows.append((escape(name), difference, same, *times))
    head = ("form", "largest difference of logits", "same answer", "ms, batch 1", "ms, batch 8")
    note = f"{parity['samples']} samples against the checkpoint" if parity.get("samples") else ""
    if latency.get("machine"):
        note += f"; times of {latency['machine']}, {latency.get('threads', 1)} threads"
    return f'{table(head, rows)}<p class="soft">{escape(note)}</p>{_left_out(parity)}'


def _variants(record: Mapping[str, Any]) -> str:
    rows = [
        (
            escape(str(one.get("name", ""))),
            _number(one.get("size"), ",.2f", 1e-6),
            _number((one.get("evaluation") or {}).get("accuracy"), ".2%"),
            escape(gained(one["gain"], one.get("low"), one.get("high"))),
            _number(one.get("agreement"), ".2%"),
        )
        for one in record.get("variants") or []
        if isinstance(one, dict) and is_number(one.get("gain"))
    ]
    head = ("variant", "MB", "accuracy", "to the checkpoint", "same answer")
    shown = f"<h3>Variants, on the whole split</h3>{table(head, rows)}" if rows else ""
    return shown + _left_out(record)


def _left_out(record: Mapping[str, Any]) -> str:
    return "".join(
        f'<p class="soft">{escape(name)} is left out: {escape(str(why))}</p>'
        for name, why in (record.get("left_out") or {}).items()
    )


def _infra(found: Mapping[str, Any]) -> str:
    """What a process with nothing but the runtime came to with each file."""
    rows, failed = [], []
    for name, one in (found.get("files") or {}).items():
        if one.get("failed"):
            failed.append(f'<p class="bad">{escape(name)}: {escape(str(one["failed"]))}</p>')
            continue
        times = one.get("latency") or {}
        rows.append(
            (
                escape(name),
                _number(one.get("load_ms"), ",.0f"),
                _number(one.get("memory_mb"), ",.0f"),
                *(_number((times.get(f"batch_{n}") or {}).get("median_ms"), ".3g") for n in (1, 8)),
            )
        )
    head = ("file", "ms to load", "MB of memory", "ms, batch 1", "ms, batch 8")
    shown = f"{table(head, rows) if rows else ''}{''.join(failed)}"
    return f"<h3>In a process with the runtime alone</h3>{shown}" if shown else ""


def _number(value: object, form: str, scale: float = 1.0) -> str:
    return format(value * scale, form) if is_number(value) else "–"
