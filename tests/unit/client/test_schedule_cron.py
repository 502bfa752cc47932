"""Cron: five fields become the six of KFP, with a description and the next times."""

import re
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kfp_ddp.client.kfp.cron import as_read, describe, next_times, often, six_fields, zone
from kfp_ddp.core.errors import InputError

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)  # a Sunday


@pytest.mark.parametrize(
    ("text", "six", "description"),
    [
        ("  0 3 * * *  ", "0 0 3 * * *", "At 03:00, every day"),
        ("30 0 3 * * *", "30 0 3 * * *", "At 03:00:30, every day"),
        ("*/15 9-17 * * mon-FRI", "0 */15 9-17 * * 1-5", "Monday through Friday"),
        ("0 3 ? * 7", "0 0 3 * * 0", "only on Sunday"),
        ("0 3 1 jan,JUL *", "0 0 3 1 1,7 *", "only in January and July"),
        ("@weekly", "0 0 0 * * 0", "only on Sunday"),
    ],
)
def test_five_fields_become_six_with_a_description(text: str, six: str, description: str) -> None:
    assert six_fields(text) == six
    assert description in describe(six)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every night", "has 2 fields"),
        ("TZ=Europe/Vienna 0 3 * * *", "write '0 3 * * *' in that zone"),
        ("@dayly", "did you mean '@daily'"),
        ("*/5 * * * * *", "write '0 * * * * *'"),
        ("60 3 * * *", "'60' is an invalid minute: it is 0 to 59"),
        ("0 3 * * mo", "'mo' is an invalid weekday: it is 0 to 6, or sun to sat"),
        ("0 3 * * MON#2", "'MON#2' is an invalid weekday of a cron"),
        ("*/0 3 * * *", "'*/0' is an invalid minute of a cron"),
        ("0 22-2 * * *", "write 22-23,0-2"),
        ("0 3 * * 1-7/2", "list the days"),
        ("٣ 3 * * *", "is an invalid minute"),
    ],
)
def test_an_invalid_cron_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        six_fields(text)


def test_a_stored_cron_is_read_as_the_server_reads_it() -> None:
    assert describe(as_read("0 3 * * *")) == "At 3 minutes past the hour, every hour, every day"
    assert (as_read("@daily"), as_read("@every 1h30m")) == ("0 0 0 * * *", "")
    assert as_read("0 0 3 * * *") == "0 0 3 * * *"


def field(lowest: int, highest: int) -> st.SearchStrategy[str]:
    """Fields of a cron: a star, a number, a range, each with a step or without."""
    number = st.integers(lowest, highest)
    span = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    base = st.one_of(st.just("*"), number.map(str), span)
    return st.tuples(base, st.sampled_from(["", "", "/2", "/7", "/25"])).map("".join)


CRONS = st.tuples(field(0, 59), field(0, 23), field(1, 28), field(1, 12), field(0, 6)).map(" ".join)


@given(CRONS)
@example("*/25 9-17 * * 1-5")
@example("0 3 */2 * 1")
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_next_times_are_those_of_the_server(cron: str) -> None:
    six = six_fields(cron)
    days = (NOON.replace(hour=0) + timedelta(days=day) for day in range(400))
    right = (day for day in days if of_day(six, day))
    moments = (day + timedelta(minutes=minute) for day in right for minute in range(1440))
    expected = list(islice((one for one in moments if of_time(six, one) and one > NOON), 3))
    assert not expected or next_times(six, zone("UTC"), NOON, count=len(expected)) == expected


def of_day(six: str, moment: datetime) -> bool:
    """Match as robfig/cron does: day and weekday if one of them starts with a star, else either."""
    _, _, _, day, month, weekday = six.split()
    days = within(day, moment.day, 1, 31), within(weekday, (moment.weekday() + 1) % 7, 0, 6)
    both = day.startswith("*") or weekday.startswith("*")
    return within(month, moment.month, 1, 12) and (all(days) if both else any(days))


def of_time(six: str, moment: datetime) -> bool:
    _, minute, hour, *_ = six.split()
    return within(hour, moment.hour, 0, 23) and within(minute, moment.minute, 0, 59)


def within(field: str, value: int, lowest: int, highest: int) -> bool:
    span, _, step = field.partition("/")
    low, dash, high = span.partition("-")
    first = lowest if low == "*" else int(low)
    last = int(high) if dash else highest if step or low == "*" else first
    return value in range(first, last + 1, int(step or 1))


def test_times_have_the_zone_of_the_server_and_unknown_ones_are_refused() -> None:
    (first,) = next_times("0 0 3 * * *", zone("Europe/Vienna"), NOON, count=1)
    assert first.isoformat() == "2026-11-23T03:00:00+01:00"
    spring = datetime(2027, 3, 27, 12, tzinfo=UTC)  # KFP runs nothing at a time that is skipped
    (first,) = next_times("0 30 2 * * *", zone("Europe/Vienna"), spring, count=1)
    assert first.isoformat() == "2027-03-29T02:30:00+02:00"
    with pytest.raises(InputError, match="never runs"):
        next_times(six_fields("0 3 31 2 *"), zone("UTC"), NOON)
    with pytest.raises(InputError, match="did you mean 'Europe/Vienna'"):
        zone("Europe/Viena")
    for name in ("Europe/Wien", "../etc/passwd"):
        with pytest.raises(InputError, match="no time zone"):
            zone(name)


@pytest.mark.parametrize(
    ("six", "minutes"),
    [
        *(("0 0 3 * * *", ""), ("0 */15 * * * *", ""), ("0 */5 3 * * *", "5 minutes")),
        ("0 0,1 * * * *", "1 minute "),
    ],
)
def test_runs_that_are_close_at_any_time_of_the_day_are_a_warning(six: str, minutes: str) -> None:
    assert minutes in often(six)
    assert bool(minutes) == bool(often(six))
