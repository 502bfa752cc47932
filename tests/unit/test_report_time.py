"""The section of a report on the time of the training."""

from pathlib import Path
from typing import Any

import pytest

from kfp_ddp import report
from kfp_ddp.report.events import downsample
from kfp_ddp.report.training import time_section
from kfp_ddp.training.time_spent import PHASES
from tests import reports
from tests.unit.test_report import text


def ranks(*seconds: dict[str, float], **more: Any) -> dict[str, Any]:
    rows = {phase: [rank.get(phase, 0.0) for rank in seconds] for phase in PHASES}
    return {"event": "ranks", "time": 9.0, "seconds": rows, **more}


def every(value: object) -> dict[str, object]:
    return {str(phase): value for phase in PHASES}


FAST = {"forward": 18.0, "backward": 45.0, "communication": 27.0}
SLOW = {"forward": 45.0, "backward": 45.0}


def test_the_section_has_phases_advice_and_the_slowest_ranks_first(tmp_path: Path) -> None:
    end = {"event": "end", "advice": ["rank 1 is slow"], "mfu": 0.41}
    events = [ranks(FAST, SLOW, nodes=["node-a", "node-b"]), end]
    folder = reports.make(tmp_path, ["a", "b"], [[9, 1], [1, 9]], events=downsample(events))
    content = text(report.html(folder))
    section = content[content.index("Where the time went") :]
    for words in (
        "90 s on each of 2 ranks forward 35.0% backward 50.0% communication 15.0%",
        "rank 1 is slow",
        "41.0 % of the peak of its devices (MFU)",
        "1 node-b 0.0 45.0 45.0 0.0 0.0 0 node-a 0.0 18.0 45.0 27.0 0.0",
    ):
        assert words in section


def test_attempts_with_equal_ranks_are_added() -> None:
    other = ranks(SLOW, SLOW, SLOW)
    events = [ranks(FAST, SLOW), {"event": "start"}, other, ranks(FAST, SLOW)]
    content = text("</style>" + str(time_section(events)))
    assert "3 min on each of 2 ranks, 2 attempts" in content


def test_only_the_slowest_of_many_ranks_are_shown() -> None:
    many = [FAST] * 999 + [SLOW]
    content = text("</style>" + str(time_section([ranks(*many)])))
    assert "the slowest 16 of 1,000" in content
    table = content[content.index("optimizer ") + len("optimizer ") :]
    assert table.startswith("999 0.0 45.0 45.0")
    assert table.count(" 27.0 ") == 15


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"seconds": []},
        {"seconds": {"data": [1.0]}},
        {"seconds": every(1.0)},
        {"seconds": every(["x"])},
        {"seconds": every([-1.0])},
        {"seconds": {**every([1.0]), "data": [1.0, 2.0]}},
        {"seconds": every([])},
    ],
)
def test_invalid_events_are_ignored(broken: dict[str, Any]) -> None:
    assert time_section([{"event": "ranks", **broken}]) == ""
