"""The top of the report: what it is of, what was decided, by how much."""

from collections.abc import Mapping
from html import escape
from typing import Any

from kfp_ddp.models.evaluation import Baseline, Compared, Evaluation
from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures import Card, cards
from kfp_ddp.report.text import duration, gained, percents, points, table
from kfp_ddp.report.training import told, trained

_CHANGED = 6
"""Classes that won or lost the most, in each table."""
_TOP5_FROM = 20
"""Classes from which top 5 says something."""


def head(found: Material) -> str:
    """Title, origin, verdict, headline numbers, champion."""
    return _title(found) + _verdict(found.verdict) + _cards(found) + _champion(found.result)


def test_split(found: Material) -> str:
    """The same checkpoint on the test split, where there is one."""
    test = found.left.test
    if test is None:
        return ""
    values = [_accuracy(test), *_quality(test)]
    return (
        f'<h2>Test split</h2><p class="soft">{test.correct:,} of {test.samples:,} samples that '
        f"nothing was chosen by right{left_out(test)}</p>{cards(values)}"
    )


def left_out(result: Evaluation) -> str:
    """What is said of images that cannot be read; '' where there are none."""
    said = f"; {result.skipped} images that cannot be read are left out"
    return said if result.skipped else ""


def _title(found: Material) -> str:
    result, dataset = found.result, found.left.dataset
    on = f" on {escape(dataset.name)}" if dataset.name not in ("", found.name) else ""
    architecture = f"{result.model}, " if found.name != result.model else ""
    sides = " + ".join(f"{count:,} {side}" for side, count in dataset.sides.items() if count)
    sides = f", {sides} images" if sides else ""
    digest = f"version {result.dataset_digest[:12]}" if result.dataset_digest else "no version"
    facts = [
        f"{architecture}step {result.step:,}",
        told(found.events),
        f"dataset {digest}{sides}, {len(result.classes):,} classes",
        f"run {found.config['run_id']}" if found.config.get("run_id") else "",
        f"evaluated {result.written[:16].replace('T', ' ')} UTC" if result.written else "",
    ]
    said = " · ".join(escape(fact) for fact in facts if fact)
    return (
        f'<h1>{escape(found.name)}{on}</h1><p class="soft">{said}</p>'
        f'<p class="soft">{result.correct:,} of {result.samples:,} samples of '
        f"{escape(result.split)} right, each counted once{left_out(result)}</p>"
    )


def _verdict(said: Mapping[str, Any]) -> str:
    if not said:
        return (
            '<div class="verdict"><b>Not judged yet</b><p>The verdict is in the report of the '
            "gate.</p></div>"
        )
    blessed = said.get("blessed") is True
    word, kind = ("Blessed", "yes") if blessed else ("Not blessed", "no")
    rules = [rule for rule in said.get("rules") or [] if isinstance(rule, dict)]
    lines = "".join(
        f'<li><b class="{"good" if rule.get("holds") else "bad"}">'
        f"{'✓' if rule.get('holds') else '✗'}</b> {escape(str(rule.get('words', '')))}</li>"
        for rule in sorted(rules, key=lambda rule: bool(rule.get("holds")))
    )
    reason = str(said.get("reason", ""))
    reason = reason.removeprefix("not blessed: ").removeprefix("blessed: ")
    shown = f"<ul>{lines}</ul>" if lines else f"<p>{escape(reason)}</p>"
    return f'<div class="verdict {kind}"><b>{word}</b>{shown}</div>'


def _cards(found: Material) -> str:
    result = found.result
    values = [_accuracy(result)]
    if result.compared is not None:
        values.append(_gain(result.compared))
    largest = baseline(result)
    if largest is not None:
        over = f"{points(result.accuracy - largest.share)} points over it"
        values.append(Card(f"always saying {_short(largest.name)}", f"{largest.share:.2%}", over))
    values += _quality(result)
    seconds, _ = trained(found.events)
    if seconds:
        values.append(Card("training time", duration(seconds)))
    return cards(values)


def _accuracy(result: Evaluation) -> Card:
    low, high = result.accuracy_low, result.accuracy_high
    return Card("accuracy", f"{result.accuracy:.2%}", f"95 % interval {percents(low, high)}")


def _gain(compared: Compared) -> Card:
    beside = "no predictions of it to tell how sure that is"
    if compared.low is not None and compared.high is not None:
        beside = f"95 % interval {points(compared.low)} to {points(compared.high)}"
    name = compared.champion_version[:12]
    return Card(f"points to champion {name}".strip(), points(compared.gain), beside)


def _quality(result: Evaluation) -> list[Card]:
    """What tells more than the accuracy where classes differ in size."""
    values = []
    if result.balanced_accuracy is not None:
        values.append(
            Card(
                "balanced accuracy",
                f"{result.balanced_accuracy:.2%}",
                _within(result, "balanced_accuracy", 100, " %"),
            )
        )
    values.append(Card("macro F1", f"{result.macro_f1:.4f}", _within(result, "macro_f1")))
    if result.top5 is not None and len(result.classes) >= _TOP5_FROM:
        values.append(Card("top-5 accuracy", f"{result.top5:.2%}"))
    values.append(Card("loss", f"{result.loss:.4f}"))
    values.append(
        Card(
            "calibration error",
            f"{result.calibration_error:.4f}",
            _within(result, "calibration_error"),
        )
    )
    return values


def _within(result: Evaluation, name: str, scale: float = 1.0, unit: str = "") -> str:
    """The interval of a metric, where it has one."""
    found = result.intervals.get(name)
    if found is None:
        return ""
    digits = 1 if unit else 3
    return f"{found.low * scale:.{digits}f}–{found.high * scale:.{digits}f}{unit}"


def baseline(result: Evaluation) -> Baseline | None:
    """The largest class, counted where an earlier version did not note it."""
    if result.baseline is not None:
        return result.baseline
    largest = max(result.classes, key=lambda one: one.samples, default=None)
    if largest is None:
        return None
    return Baseline(name=largest.name, share=largest.samples / result.samples)


def _champion(result: Evaluation) -> str:
    """How it compares with the champion: overall, and the classes that won and lost."""
    compared = result.compared
    if compared is None:
        return ""
    version = compared.champion_version[:12] or compared.champion
    said = (
        f"Accuracy {gained(compared.gain, compared.low, compared.high)} against the champion "
        f"{version}, which has {compared.champion_accuracy:.2%} on the same samples"
    )
    if compared.won is not None and compared.lost is not None:
        said += (
            f": {compared.won:,} samples only this model told right, {compared.lost:,} only the "
            "champion"
        )
    if compared.p_value is not None:
        said += f"; chance alone would give as much with p = {compared.p_value:.2g}"
    parts = [f"<h2>Against the champion</h2><p>{escape(said)}.</p>"]
    changed = sorted(compared.classes, key=lambda one: one.gain)
    tables = []
    won = [one for one in reversed(changed) if one.gain > 0][:_CHANGED]
    lost = [one for one in changed if one.gain < 0][:_CHANGED]
    for title, classes in (("Classes that won", won), ("Classes that lost", lost)):
        rows = (
            (
                escape(one.name),
                f"{one.samples:,}",
                f"{one.won:,} / {one.lost:,}",
                f"<b class='{'good' if one.gain > 0 else 'bad'}'>{points(one.gain)}</b> "
                f"<small>{points(one.low)} to {points(one.high)}</small>",
            )
            for one in classes
        )
        if classes:
            of = ("class", "samples", "won / lost", "recall, points")
            tables.append(f"<div><h3>{title}</h3>{table(of, rows)}</div>")
    if tables:
        parts.append(f'<div class="row">{"".join(tables)}</div>')
    return "".join(parts)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
