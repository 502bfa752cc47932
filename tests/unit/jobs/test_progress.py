"""Lines of a log as they are printed, also of a progress bar, and the line of progress."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_ddp.jobs.follow.logs import LONGEST, drawn, unprinted
from kfp_ddp.jobs.follow.printer import LogCursor
from kfp_ddp.jobs.progress import Event, MetricsTail, ProgressPrinter, TrainingProgress
from kfp_ddp.k8s.api import split_lines

BAR = "".join(f"\r{percent}%|{'#' * percent}" for percent in range(101))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chunks=st.lists(st.binary(max_size=40) | st.text("ab\r\n", max_size=9).map(str.encode)))
def test_lines_do_not_depend_on_the_chunks_of_a_stream(chunks: list[bytes]) -> None:
    text = b"".join(chunks)
    *complete, rest = text.split(b"\n")
    assert list(split_lines(chunks)) == [line + b"\n" for line in complete] + [rest] * bool(rest)
    pieces = list(split_lines(chunks, 10))
    assert pieces == list(split_lines([text], 10))
    assert max(map(len, pieces), default=0) <= 11
    assert b"".join(pieces).replace(b"\n", b"") == text.replace(b"\n", b"")


def test_a_line_without_an_end_is_split() -> None:
    chunks = iter([b"2026-01-01T00:00:00Z " + BAR.encode() * 3] + [BAR.encode()] * 3)
    first = next(split_lines(chunks, LONGEST))
    assert len(first) == LONGEST + 1
    assert first.endswith(b"\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("of windows\r", "of windows"),
        ("\r\r", ""),
        (BAR, f"100%|{'#' * 100}"),
        (f"{BAR}\rdone\r", "done"),
    ],
)
def test_only_the_last_state_of_a_bar_is_printed(text: str, shown: str) -> None:
    assert drawn(text) == shown


def test_each_piece_of_a_long_line_is_printed_once_after_a_cut() -> None:
    stamp = "2026-01-01T00:00:00.5Z"
    lines = [f"{stamp} one", f"{stamp} " + "x" * 5, "y" * 6, "z", f"{stamp} two"]
    whole = list(unprinted(lines, 0, None))
    assert [text for _, text in whole] == ["one", "x" * 5, "y" * 6, "z", "two"]
    for done in range(len(lines)):
        cursor: LogCursor = whole[done][0]
        again = [text for _, text in unprinted(lines, 0, cursor)]
        assert again == [text for _, text in whole[done + 1 :]]
    assert list(unprinted(["no time at all"], 0, None)) == []


def steps(*pairs: tuple[int, float]) -> list[Event]:
    return [
        {"event": "step", "time": at, "step": step, "loss": 0.5, "images_per_s": 1234.4}
        for step, at in pairs
    ]


def test_tail_waits_for_the_end_of_a_line_and_passes_over_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"event": "step", "step": 1}\n{"event": "st')
    assert [event["step"] for event in tail.read()] == [1]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep", "step": 2}\nnot json\n[1]\n' + "[" * 200_000 + "\n")
        file.write(json.dumps({"step": 3}) + "\n")
    assert [event["step"] for event in tail.read()] == [2, 3]


def test_progress_line_has_step_loss_speed_and_the_time_that_is_left() -> None:
    progress = TrainingProgress()
    assert not progress.update([{"event": "start", "steps_total": 110}])
    assert progress.update(steps((10, 100.0), (20, 105.0)))
    assert progress.line() == "step 20/110 · loss 0.500 · 1,234 images/s · ETA 0:45"
    progress.update([{"event": "eval", "accuracy": 0.987}])
    assert "val accuracy 98.7%" in progress.line()


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({"data_wait_fraction": 0.09, "communication_seconds": 0.19}, ""),
        ({"data_wait_fraction": 0.12, "communication_seconds": 0.3}, " · 12% waits for data"),
        ({"communication_seconds": 0.3}, " · 30% waits for gradients"),
        (
            {"data_wait_fraction": 0.5, "straggles": True, "slowest_rank": 3,
             "slowest_ratio": 1.84, "slowest_phase": "forward"},
            " · rank 3 takes 1.8 times as long, in forward",
        ),
        ({"straggles": False, "slowest_rank": 3, "slowest_ratio": 1.1}, ""),
        (
            {"straggles": True, "slowest_rank": 3, "slowest_ratio": 2, "slowest_phase": "a\nb",
             "data_wait_fraction": None},
            "",
        ),
    ],
)  # fmt: skip
def test_progress_line_shows_waits(fields: Event, waits: str) -> None:
    progress = TrainingProgress()
    progress.update([{**steps((10, 100.0))[0], "step_seconds": 1.0, **fields}])
    assert progress.line() == f"step 10 · loss 0.500 · 1,234 images/s{waits}"


def test_the_rate_is_reset_on_resume() -> None:
    progress = TrainingProgress()
    progress.update(steps((10, 0.0), (20, 10.0)))
    progress.update([{"event": "start", "steps_total": 110}, *steps((20, 1000.0), (30, 1005.0))])
    assert progress.seconds_left() == 40.0


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    progress = TrainingProgress()
    progress.update([{"event": "step", "step": 1, "time": 0, "loss": None, "images_per_s": 1}])
    assert progress.line() == "step 1 · 1 images/s"


def test_progress_is_printed_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    path, report = tmp_path / "metrics.jsonl", list[str]()
    path.write_text('{"event": "step", "step": 9}\n')  # of an earlier attempt
    printer = ProgressPrinter(report.append, path, seconds=10)

    def write(step: int) -> None:
        with path.open("a") as file:
            file.write(json.dumps(steps((step, step))[0]) + "\n")

    printer.update(100)
    assert report == []
    for step, at, lines in ((1, 101, 1), (2, 105, 1), (3, 111, 2), (4, 112, 2)):
        write(step)
        printer.update(at)
        assert len(report) == lines
        assert printer.updated_at == at
    printer.update(113, at_once=True)
    assert report[-1].startswith("step 4")
    printer.update(200, at_once=True)
    assert len(report) == 3
    assert printer.updated_at == 112


@pytest.mark.parametrize("odd", [None, "many", [1], float("nan"), 10**400])
def test_figures_that_are_no_numbers_are_left_out(odd: object) -> None:
    names = ("steps_total", "accuracy", "step", "loss", "images_per_s", "time", "step_seconds")
    kinds = ("start", "step", "eval", "step", "end")
    progress = TrainingProgress()
    progress.update([{"event": kind, **dict.fromkeys(names, odd)} for kind in kinds])
    progress.update([{"event": "step", "step": number, "loss": odd} for number in (1, 2)])
    assert progress.line().startswith("step ")
