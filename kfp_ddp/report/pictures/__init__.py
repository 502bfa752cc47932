"""Self-contained pictures for HTML artifacts: inline SVG and CSS, no scripts, nothing fetched.

The KFP UI shows an HTML artifact in an iframe with `sandbox="allow-scripts"`, so whatever is
not in the document itself is not there. Colours follow the reader's light or dark scheme.
"""

from kfp_ddp.report.pictures.lines import COLOURS, MAX_POINTS, Marks, Point, Series, line_chart
from kfp_ddp.report.pictures.matrix import MAX_CELLS_SIDE, NUMBERED, confusion_matrix, legend
from kfp_ddp.report.pictures.shares import Part, shares_bar
from kfp_ddp.report.pictures.style import Card, cards, page
from kfp_ddp.report.pictures.training import (
    curve,
    epochs_per_step,
    is_number,
    read_events,
    resumed,
    training_curves,
)

__all__ = [
    "COLOURS",
    "MAX_CELLS_SIDE",
    "MAX_POINTS",
    "NUMBERED",
    "Card",
    "Marks",
    "Part",
    "Point",
    "Series",
    "cards",
    "confusion_matrix",
    "curve",
    "epochs_per_step",
    "is_number",
    "legend",
    "line_chart",
    "page",
    "read_events",
    "resumed",
    "shares_bar",
    "training_curves",
]
