"""Samples that were told wrong, as pictures with their names."""

from collections.abc import Sequence
from html import escape

from kfp_ddp.report.ingredients import Mistake
from kfp_ddp.report.material import Material


def mistakes(found: Material) -> str:
    """Those of the highest loss, and those that the model was surest of."""
    left, result = found.left, found.result
    if result.correct == result.samples:
        return "<h2>Worst mistakes</h2><p>None.</p>"
    if not left.mistakes:
        return ""
    parts = [f"<h2>Worst mistakes, the highest loss first</h2>{_pictures(left.mistakes)}"]
    if left.surest:
        parts.append(
            '<h2>Others that it was surest of</h2><p class="soft">Sure and wrong is often a wrong '
            f"label: look at these files.</p>{_pictures(left.surest)}"
        )
    return "".join(parts)


def _pictures(some: Sequence[Mistake]) -> str:
    return f'<ul class="thumbs">{"".join(map(_picture, some))}</ul>'


def _picture(one: Mistake) -> str:
    kind, said = ' class="tiny"' if one.tiny else "", escape(one.path)
    return (
        f'<li><img{kind} src="data:image/webp;base64,{escape(one.picture)}" alt="{said}" '
        f'title="{said}"><b>{escape(one.target)}</b> taken for <b>{escape(one.predicted)}</b><br>'
        f"<span class='soft'>{one.confidence:.1%} sure</span><small>{said}</small></li>"
    )
