"""Whether the model is as often right as it says."""

from kfp_ddp.models.evaluation import CalibrationBin, wilson
from kfp_ddp.report.material import Material
from kfp_ddp.report.pictures.plot import HEIGHT, Axis, Key, across, dot, down, linear, plot

_BINS = 15
_PERCENT = Axis(0.0, 1.0, [(tick / 5, f"{tick * 20}%") for tick in range(6)])
_FEW = 5
"""Samples below which a bin is drawn as its interval alone."""


def calibration(found: Material) -> str:
    """Accuracy by confidence with its intervals, and how many samples each is of."""
    bins = [one for one in found.result.calibration if one.samples]
    if not bins:
        return ""
    error = found.result.calibration_error
    said = (
        "Of samples told with so much confidence, how many were right: below the dashed line the "
        f"model is too sure, above it not sure enough. On average it is off by {error:.1%}."
    )
    return (
        f'<h2>Calibration</h2><p class="soft">{said}</p>'
        f'<div class="row">{_accuracy(bins)}{_counts(bins)}</div>'
    )


def _accuracy(bins: list[CalibrationBin]) -> str:
    parts = [f'<path class="mark" d="M0 {HEIGHT}L{across(_PERCENT, 1):.0f} 0"/>']
    for one in bins:
        x = across(_PERCENT, one.confidence)
        low, high = wilson(round(one.accuracy * one.samples), one.samples)
        parts.append(
            f'<path stroke="var(--s0)" stroke-width="1.5" d="M{x:.1f} {down(_PERCENT, low):.1f}'
            f'V{down(_PERCENT, high):.1f}"/>'
        )
        if one.samples >= _FEW:
            parts.append(dot(x, down(_PERCENT, one.accuracy), 0))
    keys = [Key("measured, with 95 % interval", 0), Key("perfect", None, "dash")]
    told = ", ".join(f"{one.confidence:.0%}: {one.accuracy:.0%}" for one in bins)
    said = f"Accuracy by confidence: {told}"
    return plot("Accuracy", _PERCENT, _PERCENT, "confidence", parts, keys, said)


def _counts(bins: list[CalibrationBin]) -> str:
    most = max(one.samples for one in bins)
    # Square roots, or one bin with nearly all samples hides how few the others have.
    y = Axis(
        0.0, most**0.5, [(t**0.5, label) for t, label in linear(0, most, 4).ticks if t <= most]
    )
    parts = []
    for one in bins:
        left = int(min(one.confidence, 1 - 1e-9) * _BINS) / _BINS
        x, end = across(_PERCENT, left), across(_PERCENT, left + 1 / _BINS)
        top = down(y, one.samples**0.5)
        parts.append(
            f'<path fill="var(--s0)" d="M{x + 2:.1f} {HEIGHT}V{top:.1f}H{end - 2:.1f}V{HEIGHT}z">'
            f"<title>{one.samples:,} samples</title></path>"
        )
    said = f"Samples by confidence: {', '.join(f'{b.confidence:.0%}: {b.samples}' for b in bins)}"
    key = [Key("root scale, so that few are seen beside many")]
    return plot("Samples", _PERCENT, y, "confidence", parts, key, said)
