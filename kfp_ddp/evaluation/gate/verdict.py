"""What the gate says: in a line, as a list for the KFP UI, and as a record for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kfp_ddp.evaluation.gate.checks import Check

FORMAT = 1


def verdict_of(checks: Sequence[Check]) -> tuple[bool, str]:
    """Blessed if all hold, and one line that names what decided it."""
    blessed = all(check.holds for check in checks)
    words = "; ".join(check.words for check in checks if check.holds == blessed)
    return blessed, " ".join(f"{'blessed' if blessed else 'not blessed'}: {words}".split())


def markdown(blessed: bool, checks: Sequence[Check]) -> str:
    """The verdict as a heading and a list of the rules, for the KFP UI."""
    from kfp_ddp.core.text import cell

    lines = [f"## {'Blessed' if blessed else 'Not blessed'}", ""]
    lines += [f"- {'holds' if c.holds else '**fails**'}: {cell(c.words)}" for c in checks]
    return "\n".join(lines) + "\n"


def without_evaluation(blessed: bool, checks: Sequence[Check]) -> str:
    """The verdict as a page, where there is no evaluation to make a report of."""
    from kfp_ddp.report.render import render_page

    return render_page("gate.html", title="Blessed" if blessed else "Not blessed", checks=checks)


def record(checks: Sequence[Check], asked: Mapping[str, Any], facts: Mapping[str, Any]) -> bytes:
    """The verdict as JSON: of the same facts always the same bytes.

    Args:
        checks: What came of each rule.
        asked: The rules that were set.
        facts: What was judged, and what it was compared with.
    """
    blessed, reason = verdict_of(checks)
    told = [
        {
            "rule": check.rule,
            "holds": check.holds,
            "value": _finite(check.value),
            "bound": _finite(check.bound),
            "words": check.words,
        }
        for check in checks
    ]
    said = {"format": FORMAT, "blessed": blessed, "reason": reason, **facts}
    said |= {"asked": dict(sorted(asked.items())), "rules": told}
    return (json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
