"""Cron schedules: five fields for users, six for KFP, whose first field is the second.

KFP accepts five fields and reads the first as seconds, so `0 3 * * *` runs each hour, at minute 3.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from zoneinfo import ZoneInfo

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import hint
from kfp_ddp.core.text import plural

MACROS = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_NAMES = {
    "month": ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
    "weekday": ["sun", "mon", "tue", "wed", "thu", "fri", "sat"],
}
_FIELDS = (
    *(("second", 0, 59), ("minute", 0, 59), ("hour", 0, 23)),
    *(("day", 1, 31), ("month", 1, 12), ("weekday", 0, 6)),
)
YEARS = 5
"""How far ahead KFP looks for the next time."""
_PART = r"(?:[*?]|(?P<low>\w+)(?:-(?P<high>\w+))?)(?P<step>/[1-9]\d?)?"


def six_fields(text: str) -> str:
    """Return a schedule of five or six fields, or a name such as @daily, as six fields.

    InputError: it is invalid, runs more than once a minute, or names a time zone.
    """
    words = text.split()
    if words and words[0].upper().startswith(("TZ=", "CRON_TZ=")):
        raise InputError(
            f"{text!r} names a time zone, which KFP refuses: its server has one for all schedules "
            f"(CRON_SCHEDULE_TIMEZONE, else UTC); write {' '.join(words[1:])!r} in that zone"
        )
    macro = text.strip()
    if macro in MACROS:
        return MACROS[macro]
    if text.startswith("@"):
        raise InputError(
            f"{text!r} is not a schedule{hint(text, list(MACROS))}; or write five fields"
        )
    if len(words) not in (5, 6):
        raise InputError(
            f"{text!r} has {len(words)} fields: a cron has five, minute hour day month weekday, "
            "such as '0 3 * * *' for each day at 03:00"
        )
    fields = words if len(words) == 6 else ["0", *words]  # KFP's first is the second
    if not fields[0].isdigit():
        raise InputError(
            f"{text!r} has six fields, so the first is the second, and {fields[0]} runs more than "
            f"once a minute: write {' '.join(['0', *fields[1:]])!r}"
        )
    checked: list[str] = []
    for field, limits in zip(fields, _FIELDS, strict=True):
        parts = [_part(part, *limits) for part in field.split(",")]
        checked.append(",".join(parts))
    return " ".join(checked)


def as_read(text: str) -> str:
    """Return the six fields that KFP reads in a schedule of the server; '' if it is not a cron."""
    fields = (MACROS.get(text.strip()) or text).split()
    if len(fields) == 5:
        fields.append("*")
    return " ".join(fields) if len(fields) == 6 else ""


def describe(six: str) -> str:
    """Return six fields as text, such as "At 03:00, every day"."""
    from cron_descriptor import Options, get_description

    options = Options()
    options.use_24hour_time_format = options.verbose = True
    return str(get_description(six, options))


def next_times(six: str, zone: tzinfo, after: datetime, count: int = 3) -> list[datetime]:
    """Return the next times in the zone of the server; raise InputError if there are none."""
    from croniter import croniter

    # As KFP's parser: a day or weekday that begins with a star does not widen the other.
    candidates = croniter(
        six,
        after.astimezone(zone),
        datetime,
        second_at_beginning=True,
        implement_cron_bug=True,
        max_years_between_matches=YEARS,
    )
    minutes, hours, *_ = map(frozenset, candidates.expanded)
    times = [after]
    for time in candidates.all_next():
        if len(times) > count or time.year > times[-1].year + YEARS:
            break
        # croniter moves a time that a change of clocks skips; KFP starts no run then.
        right_minute = minutes & {"*", time.minute}
        right_hour = hours & {"*", time.hour}
        if right_minute and right_hour:
            times.append(time)
    if len(times) == 1:
        raise InputError(f"{six!r} never runs ({describe(six)}): correct day and month")
    return times[1:]


def often(six: str) -> str:
    """Return a warning about a schedule that runs more than each quarter of an hour; or ''."""
    times = next_times(six, UTC, datetime.now(UTC), 61)  # more than an hour of each minute
    minutes = [int((after - before).total_seconds()) // 60 for before, after in pairwise(times)]
    shortest = min(minutes, default=15)
    if shortest >= 15:
        return ""
    return f"starts runs {plural(shortest, 'minute')} apart"


def zone(name: str) -> tzinfo:
    """Return the time zone of a name; raise InputError if it does not exist."""
    if name == "UTC":
        return UTC  # needs no database of zones
    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        from zoneinfo import available_timezones

        near = hint(name, sorted(available_timezones()))
        remedy = near or "; write one such as Europe/Vienna or UTC"
        raise InputError(f"there is no time zone {name!r}{remedy}") from None


def _part(part: str, name: str, lowest: int, highest: int) -> str:
    """Return one part of a field in numbers; Sunday is 0 and never 7."""
    match = re.fullmatch(_PART, part, re.ASCII)
    if match is None:
        raise InputError(f"{part!r} is an invalid {name} of a cron: write *, 5, 1-5, */15 or 1,15")
    low = match["low"]
    high = match["high"]
    step = match["step"] or ""
    if low is None:
        return f"*{step}"
    first = _number(low, name, lowest, highest)
    if high is None:
        number = first % 7 if name == "weekday" else first
        return f"{number}{step}"
    last = _number(high, name, lowest, highest)
    if first > last:
        raise InputError(
            f"{part!r} as {name} ends before it begins: write {low}-{highest},{lowest}-{high}"
        )
    if name == "weekday" and last == 7:
        return _days_to_sunday(part, first, step)
    if first == last:
        return str(first)
    return f"{_span(first, last)}{step}"


def _days_to_sunday(part: str, first: int, step: str) -> str:
    """Return the days from the first to a Sunday that is written 7, which KFP does not know."""
    if step:
        raise InputError(f"{part!r} as weekday has a step beyond Saturday: list the days")
    return f"{_span(first, 6)},0" if first < 7 else "0"


def _span(first: int, last: int) -> str:
    """Return a range; croniter reads one of a single number, such as 1-1, as a star."""
    return f"{first}-{last}" if first < last else str(first)


def _number(word: str, name: str, lowest: int, highest: int) -> int:
    names: Sequence[str] = _NAMES.get(name, ())
    if word.lower() in names:
        return names.index(word.lower()) + lowest
    most = 7 if name == "weekday" else highest  # 7 is Sunday, too
    valid = word.isdigit() and lowest <= int(word) <= most
    if not valid:
        also = f", or {names[0]} to {names[-1]}" if names else ""
        raise InputError(f"{word!r} is an invalid {name}: it is {lowest} to {highest}{also}")
    return int(word)
