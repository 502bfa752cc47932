"""Values of the template `evaluation.html`, section by section."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

from markupsafe import Markup

from kfp_ddp.core import packed
from kfp_ddp.core.errors import InputError
from kfp_ddp.models.evaluation import (
    FEWEST_KEPT,
    CalibrationBin,
    ClassChange,
    ClassResult,
    Cut,
    Evaluation,
    Figure,
    Slice,
    best_cut,
    figures_for,
    wilson,
)
from kfp_ddp.report.charts import (
    HEIGHT,
    MAX_NUMBERED,
    Axis,
    LegendEntry,
    Shape,
    confusion_matrix,
    dot,
    linear,
    plot,
    shorten,
)
from kfp_ddp.report.data import Confusion, Material
from kfp_ddp.report.events import MAX_POINTS, is_number, of_kind, training_time
from kfp_ddp.report.render import Card, duration, number, percents, points, points_with_interval
from kfp_ddp.report.training import training_line
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.time_spent import cost_of

_MAX_CHANGES = 6
"""Classes in each table of the comparison with the champion."""
_FILES = 10
"""Names of unreadable images."""
_TOP5_FROM = 20
"""Classes from which top-5 accuracy is of interest."""
_FORMATS = {"share": ".2%", "number": ".4f", "count": ",d"}
_BINS = 15
_PASSED_ON = 0.1
"""Share of the pictures that somebody looks at, in the sentence above the curve."""
_PERCENT = Axis(0.0, 1.0, [(tick / 5, f"{tick * 20}%") for tick in range(6)])
_MIN_BIN = 5
"""Samples from which a calibration bin has a dot."""
_MAX_CLASSES = 100
"""Classes in the matrix."""
_MAX_PART = 14
"""Classes in a part of the matrix."""
_FIRST_ROWS = 20
_MAX_ROWS = 1000
"""Rows of a table in the page."""
_MIN_CLASS = 10
"""Samples below which a class is named as small."""
_LOCATIONS = frozenset({"data", "output_dir", "cache_dir", "run_id"})
"""Settings that do not affect the model."""


T = TypeVar("T")


class Folded(NamedTuple, Generic[T]):
    """Rows of a table: the first ones, and those that are folded."""

    first: Sequence[T]
    rest: Sequence[T]
    total: int


def title_facts(material: Material) -> list[str]:
    """Return the origin of the model and of the evaluation."""
    result = material.result
    architecture = f"{result.model}, " if material.name != result.model else ""
    counts = [f"{count:,} {side}" for side, count in material.data.dataset.sides.items() if count]
    sides = f", {' + '.join(counts)} images" if counts else ""
    digest = f"version {result.dataset_digest[:12]}" if result.dataset_digest else "no version"
    run_id = material.config.get("run_id")
    facts = [
        f"{architecture}step {result.step:,}",
        training_line(material.events),
        f"dataset {digest}{sides}, {len(result.classes):,} classes",
        f"run {run_id}" if run_id else "",
        f"evaluated {result.written[:16].replace('T', ' ')} UTC" if result.written else "",
    ]
    return [fact for fact in facts if fact]


class Rule(NamedTuple):
    """A rule of a verdict; `unproven` fails only for lack of samples."""

    holds: bool
    unproven: bool
    words: str


def rules(verdict: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a verdict, the failed ones first."""
    listed = verdict.get("rules") or []
    rows = [
        Rule(bool(rule.get("holds")), rule.get("unproven") is True, str(rule.get("words", "")))
        for rule in listed
        if isinstance(rule, dict)
    ]
    return sorted(rows, key=lambda rule: (rule.holds, rule.unproven))


def headline(material: Material) -> list[Card]:
    """Return the headline numbers of the evaluation."""
    result = material.result
    accuracy, *others = quality(result)
    cards = [accuracy]
    if (compared := result.compared) is not None:
        detail = "no predictions of the champion, so no interval"
        if compared.low is not None and compared.high is not None:
            detail = f"95 % interval {points(compared.low)} to {points(compared.high)}"
        label = f"points to champion {compared.champion_version[:12]}".strip()
        cards.append(Card(label, points(compared.gain), detail))
    if result.classes:
        cards.append(_majority(result))
    cards += others
    seconds, _ = training_time(material.events)
    if seconds:
        cost = cost_of(material.events, material.config)
        cards.append(Card("training time", duration(seconds), str(cost)))
    return cards


def _majority(result: Evaluation) -> Card:
    """Return the accuracy of always answering the largest class."""
    largest = max(result.classes, key=lambda own: own.samples)
    share = largest.samples / result.samples
    gain = result.accuracy - share
    detail = f"{abs(gain) * 100:.2f} points {'above' if gain >= 0 else 'below'} it"
    return Card(f"majority-class baseline: {shorten(largest.name, 24)}", f"{share:.2%}", detail)


def changes(result: Evaluation) -> list[tuple[str, list[ClassChange]]]:
    """Return the classes that improved and that got worse against the champion, with a title."""
    if result.compared is None:
        return []
    by_gain = sorted(result.compared.classes, key=lambda change: change.gain)
    better = [change for change in reversed(by_gain) if change.gain > 0]
    worse = [change for change in by_gain if change.gain < 0]
    tables = []
    if better:
        tables.append(("Classes that improved", better[:_MAX_CHANGES]))
    if worse:
        tables.append(("Classes that got worse", worse[:_MAX_CHANGES]))
    return tables


def problems(material: Material) -> list[str]:
    """Return the known problems of the dataset."""
    lines = list(material.data.dataset.problems)
    left_out = material.result.skipped
    if left_out:
        what = f"{_unreadable(left_out)} of this split left out"
        lines.append(_named(what, left_out, material.result.skipped_files))
    events = of_kind(material.events, "unreadable")
    files: set[str] = set()
    for event in events:
        files.update(map(str, event.get("files") or ()))
    if files:
        # After a resume, events begin anew, so an event may count fewer images than there are.
        count = max(len(files), *(int(event.get("images") or 0) for event in events))
        lines.append(_named(f"{_unreadable(count)} skipped in the training", count, sorted(files)))
    elif any(event.get("skipped_images") for event in of_kind(material.events, "step")):
        # Events of earlier versions have no names.
        lines.append("unreadable images skipped in the training")
    return lines


def _unreadable(count: int) -> str:
    return f"{count:,} unreadable image{'s' if count > 1 else ''}"


def _named(what: str, count: int, files: Sequence[str]) -> str:
    """Return a problem with the names of the first files."""
    if not files:
        return what
    more = f" and {count - _FILES:,} more" if count > _FILES else ""
    return f"{what}: {', '.join(files[:_FILES])}{more}"


def calibration(result: Evaluation) -> list[Markup]:
    """Return charts of accuracy and samples by confidence; [] without samples."""
    bins = [one for one in result.calibration if one.samples]
    return [_calibration_accuracy(bins), _calibration_samples(bins)] if bins else []


def doubt(material: Material) -> dict[str, Any]:
    """Return what is wrong if the less probable pictures are passed on; {} if that is unknown."""
    found = material.cuts
    if not found or not found[-1].wrong:
        return {}
    tenth = next(cut for cut in found if cut.passed_on <= _PASSED_ON)
    words = (
        f"If it may pass on {_PASSED_ON:.0%} of the pictures, the least probable ones, "
        f"{tenth.wrong:.1%} of the rest are wrong; of all pictures {found[-1].wrong:.1%} are."
    )
    try:
        chosen = best_cut(material.result, found)
    except InputError as error:
        return {"words": words, "threshold": f"No threshold: {error}.", "chart": _doubt(found)}
    threshold = (
        "predict and serve call a picture unsure if its probability is below "
        f"{chosen.probability:.1%}. {chosen.passed_on:.1%} of these pictures are, and "
        f"{chosen.wrong:.1%} of the rest are wrong."
    )
    return {"words": words, "threshold": threshold, "chart": _doubt(found, chosen)}


def confusion(material: Material) -> dict[str, Any]:
    """Return the matrix to show, all of it for few classes, and the title of a partial one."""
    result = material.result
    names = [one.name for one in result.classes]
    full = Markup()
    if result.confusion is not None and len(names) <= _MAX_CLASSES:
        full = confusion_matrix(names, result.confusion)
    if full and len(names) <= MAX_NUMBERED:
        return {"matrix": full, "title": "", "full": Markup()}
    part = _most_confused(material.confusions)
    title = f"The {len(part)} of {len(names):,} classes with the most confusion" if part else ""
    return {"matrix": _partial_matrix(material, part), "title": title, "full": full}


def classes(result: Evaluation) -> tuple[Folded[ClassResult], list[str]]:
    """Return the classes by ascending F1, and notes on those with few samples."""
    order = sorted(result.classes, key=lambda one: (one.samples == 0, one.f1, one.name))
    few = sum(0 < one.samples < _MIN_CLASS for one in order)
    none = sum(one.samples == 0 for one in order)
    notes = []
    if few:
        notes.append(f"{few:,} classes have fewer than {_MIN_CLASS} samples: see their intervals")
    if none:
        notes.append(f"{none:,} classes have no sample in this split")
    return _fold(order), notes


def slices(result: Evaluation) -> list[tuple[str, Folded[Slice]]]:
    """Return the slices of each tag by ascending accuracy."""
    return [
        (name, _fold(sorted(group, key=lambda one: one.accuracy)))
        for name, group in groupby(result.slices, key=lambda one: one.name)
    ]


def exported(bundle: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables of the bundle: its files, its variants, and runs in a separate process."""
    parity = bundle.get("parity", {})
    latency = bundle.get("latency", {})
    variants = bundle.get("variants", {})
    files = bundle.get("infra", {}).get("files") or {}
    failed = {name: file["failed"] for name, file in files.items() if file.get("failed")}
    served = {name: file for name, file in files.items() if name not in failed}
    tables = {
        "forms": _forms(parity.get("formats") or {}, latency.get("runtimes") or {}),
        "forms_left_out": parity.get("left_out") or {},
        "variants": _variants(variants.get("variants") or []),
        "variants_left_out": variants.get("left_out") or {},
        "served": [_served(name, file) for name, file in served.items()],
        "failed": failed,
    }
    if not any(tables.values()):
        return {}
    return {**tables, "note": _note(parity, latency)}


def _forms(
    formats: Mapping[str, Any], runtimes: Mapping[str, Any]
) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each form: its agreement with the checkpoint, and its latencies."""
    rows = []
    for name in dict.fromkeys((*formats, *runtimes)):
        agreement = formats.get(name) or {}
        difference = number(agreement.get("max_abs_difference"), ".2g")
        same = number(agreement.get("same_top1"), ".1%")
        rows.append((name, difference, same, *_latencies(runtimes.get(name) or {})))
    return rows


def _variants(variants: Sequence[Any]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each variant whose gain over the model is known."""
    rows = []
    for variant in variants:
        if not isinstance(variant, dict) or not is_number(variant.get("gain")):
            continue
        evaluation = variant.get("evaluation") or {}
        row = (
            variant.get("name", ""),
            number(variant.get("size"), ",.2f", 1e-6),
            number(evaluation.get("accuracy"), ".2%"),
            points_with_interval(variant["gain"], variant.get("low"), variant.get("high")),
            number(variant.get("agreement"), ".2%"),
        )
        rows.append(row)
    return rows


def _served(name: str, file: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """Return what a file took in a process with only the runtime."""
    load = number(file.get("load_ms"), ",.0f")
    memory = number(file.get("memory_mb"), ",.0f")
    return (name, load, memory, *_latencies(file.get("latency") or {}))


def _note(parity: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    """Return how the forms were measured."""
    note = f"{parity['samples']} samples against the checkpoint" if parity.get("samples") else ""
    if latency.get("machine"):
        note += f"; times of {latency['machine']}, {latency.get('threads', 1)} threads"
    return note


def provenance(material: Material) -> dict[str, str]:
    """Return digests and machine, by title."""
    result = material.result
    dataset = material.data.dataset
    size = f"{dataset.files:,} files, {dataset.bytes / 1e6:,.1f} MB"
    rows = {
        "checkpoint": result.checkpoint,
        "checkpoint sha256": result.checkpoint_digest,
        "dataset": f"{dataset.source}, {size}" if dataset.source else "",
        "dataset digest": result.dataset_digest or "not recorded beside the data",
        "samples digest": result.samples_digest,
        "image size": f"{result.image_size} x {result.image_size}",
        "evaluated on": f"{result.hardware or result.device}, in {result.seconds:.1f} s",
    }
    return {title: value for title, value in rows.items() if value}


def settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training settings that differ from the default, and the others."""
    changed: dict[str, Any] = {}
    default: dict[str, Any] = {}
    for name, value in config.items():
        known = TrainConfig.model_fields.get(name)
        same = known is not None and known.default == value
        (default if same or name in _LOCATIONS else changed)[name] = packed.describe(value)
    return changed, default


def quality(result: Evaluation) -> list[Card]:
    """Return the accuracy, then the metrics that are of interest if classes differ in size."""
    figures = figures_for("page")
    figures.sort(key=lambda figure: (figure.name != "accuracy", not figure.by_class))
    cards = []
    for figure in figures:
        value = getattr(result, figure.name)
        too_few_classes = figure.name == "top5" and len(result.classes) < _TOP5_FROM
        if value is not None and not too_few_classes:
            text = format(value, _FORMATS[figure.form])
            cards.append(Card(figure.title, text, _interval(result, figure)))
    return cards


def _interval(result: Evaluation, figure: Figure) -> str:
    """Return the interval of a figure; '' without one."""
    interval = result.interval(figure.name)
    if interval is None or not figure.interval:
        return ""
    ends = f"{interval.low:.3f}–{interval.high:.3f}"
    if figure.form == "share":
        ends = percents(interval.low, interval.high)
    return f"95 % interval {ends}" if figure.interval == "always" else ends


def _calibration_accuracy(bins: Sequence[CalibrationBin]) -> Markup:
    shapes = [Shape(f"M0 {HEIGHT}L{_PERCENT.x(1):.0f} 0", "mark")]
    for one in bins:
        x = _PERCENT.x(one.confidence)
        low, high = wilson(round(one.accuracy * one.samples), one.samples)
        line = f"M{x:.1f} {_PERCENT.y(low):.1f}V{_PERCENT.y(high):.1f}"
        shapes.append(Shape(line, "interval", 0))
        if one.samples >= _MIN_BIN:
            shapes.append(dot(x, _PERCENT.y(one.accuracy), 0))
    keys = [LegendEntry("measured, with 95 % interval", 0), LegendEntry("perfect", None, "dash")]
    values = ", ".join(f"{one.confidence:.0%}: {one.accuracy:.0%}" for one in bins)
    label = f"Accuracy by confidence: {values}"
    return plot("Accuracy", _PERCENT, _PERCENT, "confidence", shapes, keys, label)


def _calibration_samples(bins: Sequence[CalibrationBin]) -> Markup:
    most = max(one.samples for one in bins)
    ticks = [(t**0.5, label) for t, label in linear(0, most, 4).ticks if t <= most]
    y = Axis(0.0, most**0.5, ticks)
    shapes = []
    for one in bins:
        start = int(min(one.confidence, 1 - 1e-9) * _BINS) / _BINS
        left = _PERCENT.x(start) + 2
        right = _PERCENT.x(start + 1 / _BINS) - 2
        top = y.y(one.samples**0.5)
        bar = f"M{left:.1f} {HEIGHT}V{top:.1f}H{right:.1f}V{HEIGHT}z"
        shapes.append(Shape(bar, fill=0, title=f"{one.samples:,} samples"))
    counts = ", ".join(f"{one.confidence:.0%}: {one.samples}" for one in bins)
    label = f"Samples by confidence: {counts}"
    key = LegendEntry("square-root scale, so that small bins are visible")
    return plot("Samples", _PERCENT, y, "confidence", shapes, [key], label)


def _doubt(found: Sequence[Cut], chosen: Cut | None = None) -> Markup:
    """Return the curve of mistakes, without its end of few images, and the cut that is chosen."""
    least = min(FEWEST_KEPT, found[-1].kept)
    shown = [cut for cut in reversed(found) if cut.kept >= least]
    highest = max(cut.wrong for cut in shown)
    ticks = linear(0, highest, 4, percent=True)
    places = [(_PERCENT.x(cut.passed_on), ticks.y(cut.wrong)) for cut in shown]
    thinned = [*places[:: math.ceil(len(places) / MAX_POINTS)], places[-1]]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in thinned)
    shapes = [Shape(path, "curve", 0)]
    keys = [LegendEntry("of the rest are wrong", 0)]
    if chosen is not None:
        shapes.append(dot(_PERCENT.x(chosen.passed_on), ticks.y(chosen.wrong), 1))
        keys.append(LegendEntry("unsure, as predict and serve have it", 1))
    label = f"Mistakes by the share that is passed on, at most {highest:.1%}"
    return plot("Mistakes", _PERCENT, ticks, "share that is passed on", shapes, keys, label)


def _partial_matrix(material: Material, chosen: Sequence[str]) -> Markup:
    """Return the matrix of some classes, with a column for all others; empty for no classes."""
    if not chosen:
        return Markup()
    samples = {one.name: one.samples for one in material.result.classes}
    pairs = Counter[tuple[str, str]]()
    correct = Counter(samples)
    for pair in material.confusions:
        pairs[pair.target, pair.predicted] = pair.count
        correct[pair.target] -= pair.count
    pairs |= {(name, name): correct[name] for name in chosen}
    counts = [[pairs[target, predicted] for predicted in chosen] for target in chosen]
    others = [samples[name] - sum(row) for name, row in zip(chosen, counts, strict=True)]
    return confusion_matrix(chosen, counts, others)


def _most_confused(pairs: Sequence[Confusion]) -> list[str]:
    """Return the classes of the first pairs, with the two of a pair side by side."""
    chosen: list[str] = []
    for pair in pairs:
        new = [name for name in (pair.target, pair.predicted) if name not in chosen]
        if len(chosen) + len(new) > _MAX_PART:
            continue
        for name in new:
            mate = pair.predicted if name == pair.target else pair.target
            place = chosen.index(mate) + 1 if mate in chosen else len(chosen)
            chosen.insert(place, name)
    return chosen


def _fold(rows: Sequence[Any]) -> Folded[Any]:
    return Folded(rows[:_FIRST_ROWS], rows[_FIRST_ROWS:_MAX_ROWS], len(rows))


def _latencies(times: Mapping[str, Any]) -> tuple[str, str]:
    """Return the median milliseconds of batches of 1 and 8."""
    one = times.get("batch_1") or {}
    eight = times.get("batch_8") or {}
    return number(one.get("median_ms"), ".3g"), number(eight.get("median_ms"), ".3g")
