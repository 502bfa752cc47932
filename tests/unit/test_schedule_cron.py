"""Five fields become the six of KFP, in words and with the next times."""

from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest

from kfp_ddp.client.cron import as_read, describe, next_times, six_fields, zone
from kfp_ddp.core.errors import InputError

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)  # a Sunday


@pytest.mark.parametrize(
    ("given", "six", "said"),
    [
        ("0 3 * * *", "0 0 3 * * *", "At 03:00, every day"),
        ("  0 3 * * *  ", "0 0 3 * * *", "At 03:00, every day"),
        ("30 0 3 * * *", "30 0 3 * * *", "At 03:00:30, every day"),
        ("*/15 9-17 * * mon-FRI", "0 */15 9-17 * * 1-5", "Monday through Friday"),
        ("0 3 ? * 7", "0 0 3 * * 0", "only on Sunday"),
        ("0 3 * * 6-7", "0 0 3 * * 6-6,0", "Sunday"),
        ("0 3 1 jan,JUL *", "0 0 3 1 1,7 *", "only in January and July"),
        ("@daily", "0 0 0 * * *", "At 00:00, every day"),
        ("@weekly", "0 0 0 * * 0", "only on Sunday"),
    ],
)
def test_five_fields_get_a_second_and_words(given: str, six: str, said: str) -> None:
    assert six_fields(given) == six
    assert said in describe(six)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("every night", "has 2 fields"),
        ("", "has 0 fields"),
        ("0 3 * * ? * 2027", "has 7 fields"),
        ("TZ=Europe/Vienna 0 3 * * *", "write '0 3 * * *' in that zone"),
        ("CRON_TZ=UTC 0 3 * * *", "names a time zone"),
        ("@dayly", "did you mean '@daily'"),
        ("*/5 * * * * *", "write '0 * * * * *'"),
        ("60 3 * * *", "'60' is an invalid minute: it is 0 to 59"),
        ("0 24 * * *", "'24' is an invalid hour"),
        ("0 3 0 * *", "'0' is an invalid day: it is 1 to 31"),
        ("0 3 * 13 *", "'13' is an invalid month: it is 1 to 12, or jan to dec"),
        ("0 3 * * 8", "'8' is an invalid weekday"),
        ("0 3 * * mo", "'mo' is an invalid weekday: it is 0 to 6, or sun to sat"),
        ("0 3 L * *", "'L' is an invalid day"),
        ("0 3 * * MON#2", "'MON#2' is an invalid weekday of a cron"),
        ("*/0 3 * * *", "'*/0' is an invalid minute of a cron"),
        ("0 22-2 * * *", "write 22-23,0-2"),
        ("0 3 * * 1-7/2", "list the days"),
        ("٣ 3 * * *", "is an invalid minute"),
    ],
)
def test_what_kfp_refuses_or_would_misread_is_refused_in_one_line(given: str, said: str) -> None:
    with pytest.raises(InputError, match=r".") as refused:
        six_fields(given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_schedule_of_the_server_is_read_as_the_server_reads_it() -> None:
    assert describe(as_read("0 3 * * *")) == "At 3 minutes past the hour, every hour, every day"
    assert as_read("@daily") == "0 0 0 * * *"
    assert as_read("0 0 3 * * *") == "0 0 3 * * *"
    assert as_read("@every 1h30m") == ""


@pytest.mark.parametrize(
    "cron",
    ["0 3 * * *", "*/25 9-17 * * 1-5", "0 3 1 * 1", "0 3 */2 * 1", "7/20 5 * * *", "0 0 31 * *"],
)
def test_the_next_times_are_those_that_the_server_would_find(cron: str) -> None:
    six = six_fields(cron)
    days = (NOON.replace(hour=0) + timedelta(days=day) for day in range(400))
    right = (day for day in days if of_day(six, day))
    moments = (day + timedelta(minutes=minute) for day in right for minute in range(1440))
    expected = (one for one in moments if of_time(six, one) and one > NOON)
    assert next_times(six, zone("UTC"), NOON, count=5) == list(islice(expected, 5))


def of_day(six: str, moment: datetime) -> bool:
    """As robfig/cron has it: both days count where one begins with a star, else either."""
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


def test_times_are_told_in_the_zone_of_the_server() -> None:
    found = next_times("0 0 3 * * *", zone("Europe/Vienna"), NOON, count=1)
    assert found[0].isoformat() == "2026-11-23T03:00:00+01:00"


def test_a_day_that_never_comes_and_a_zone_that_is_none_are_refused() -> None:
    with pytest.raises(InputError, match="never runs"):
        next_times(six_fields("0 3 31 2 *"), zone("UTC"), NOON)
    with pytest.raises(InputError, match="no time zone 'Europe/Wien'"):
        zone("Europe/Wien")
    with pytest.raises(InputError, match="did you mean 'Europe/Vienna'"):
        zone("Europe/Viena")
    with pytest.raises(InputError, match="no time zone"):
        zone("../etc/passwd")
