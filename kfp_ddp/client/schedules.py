"""Schedules of a KFP server, which it calls recurring runs: to find one, and what it does."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kfp_ddp.client import cron
from kfp_ddp.client.pages import pages
from kfp_ddp.client.runs import NOT_YET, UUID, known_time, newest_runs
from kfp_ddp.client.steps import OVER
from kfp_ddp.core.errors import InputError, RefusedError
from kfp_ddp.core.settings import hint

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1RecurringRun, V2beta1Run

PAGE = 100
ALL = 1_000_000
ENABLED, PAUSED, ENDED = "enabled", "paused", "ended"


def all_of(client: "kfp.Client") -> "list[V2beta1RecurringRun]":
    """Every schedule of the namespace, the newest first."""

    def ask(token: str) -> "tuple[Sequence[V2beta1RecurringRun], str]":
        answer = client.list_recurring_runs(
            page_token=token,
            page_size=PAGE,
            sort_by="created_at desc",
            namespace=client.get_user_namespace() or None,  # unlike of runs, it does not ask itself
        )
        return answer.recurring_runs, answer.next_page_token

    return [each for page in pages(ask) for each in page]


def find(client: "kfp.Client", word: str) -> "V2beta1RecurringRun":
    """The one schedule that a person means.

    Of several of one name it is the one that is enabled: others are what `replace` left.

    Args:
        client: Of the server.
        word: The schedule's name, its id, or the first characters of that.

    Raises:
        InputError: there is none, or more than one.
    """
    if UUID.fullmatch(word):
        try:
            return client.get_recurring_run(word)
        except RefusedError as error:
            if error.status != 404:
                raise
            raise InputError(
                f"there is no schedule {word}: it was deleted, or is another server's; "
                "kfp-ddp schedule list shows them"
            ) from None
    known = all_of(client)
    found = named(known, word) or [
        one for one in known if word and one.recurring_run_id.startswith(word)
    ]
    if not found:
        near = hint(word, [one.display_name for one in known])
        raise InputError(
            f"there is no schedule {word!r}{near or '; kfp-ddp schedule list shows them'}"
        )
    enabled = [one for one in found if state(one) == ENABLED]
    same = len({one.display_name for one in found}) == 1
    if len(enabled) > 1 or (not same and len(found) > 1):
        several = ", ".join(one.recurring_run_id[:8] for one in found)
        raise InputError(f"{word!r} is {len(found)} schedules: {several}; give one's id")
    return (enabled or found)[0]


def named(known: "list[V2beta1RecurringRun]", name: str) -> "list[V2beta1RecurringRun]":
    """Those of that very name."""
    return [one for one in known if one.display_name == name]


def runs_of(client: "kfp.Client", schedule: "V2beta1RecurringRun") -> "Iterator[V2beta1Run]":
    """The runs that it has started, the newest first."""
    newest = newest_runs(client, ALL, schedule.experiment_id)
    since = schedule.created_at or NOT_YET
    for run in takewhile(lambda one: (one.created_at or since) >= since, newest):
        if run.recurring_run_id == schedule.recurring_run_id:
            yield run


def going(client: "kfp.Client", schedule: "V2beta1RecurringRun") -> "list[V2beta1Run]":
    """Those of its runs that are not over."""
    return [run for run in runs_of(client, schedule) if run.state not in OVER]


def state(schedule: "V2beta1RecurringRun", now: datetime | None = None) -> str:
    """Whether it starts runs."""
    end = limits(schedule)[1]
    if end is not None and end <= (now or datetime.now(UTC)):
        return ENDED
    return ENABLED if schedule.status == "ENABLED" else PAUSED


def written(schedule: "V2beta1RecurringRun") -> str:
    """Its cron, as the server keeps it; '' where it has none."""
    return str(_trigger(schedule).get("cron") or "")


def when(schedule: "V2beta1RecurringRun") -> str:
    """What its server does, in words."""
    found = _trigger(schedule)
    if seconds := found.get("interval_second"):
        return f"Every {int(seconds):,} seconds"
    six = cron.as_read(written(schedule))
    return cron.words(six) if six else written(schedule) or "never"


def misread(schedule: "V2beta1RecurringRun") -> str:
    """What is wrong with a cron that the server does not read as its author does; '' if nothing."""
    given = written(schedule)
    if len(given.split()) != 5:
        return ""
    return (
        f"its cron has five fields ({given}), of which KFP reads the first as seconds; "
        f"kfp-ddp schedule replace {schedule.display_name} --cron '{given}' sets it right"
    )


def limits(schedule: "V2beta1RecurringRun") -> tuple[datetime | None, datetime | None]:
    """When it begins and ends; None where it is open."""
    found = _trigger(schedule)
    return known_time(found.get("start_time")), known_time(found.get("end_time"))


def next_of(
    schedule: "V2beta1RecurringRun", zone: tzinfo, now: datetime, count: int = 3
) -> list[datetime]:
    """When it starts its next runs, were it enabled; none where nobody here can tell."""
    six = cron.as_read(written(schedule))
    start, end = limits(schedule)
    try:
        times = cron.next_times(six, zone, max(now, start or now), count) if six else []
    except InputError:
        return []
    return [each for each in times if end is None or each <= end]


def _trigger(schedule: "V2beta1RecurringRun") -> dict[str, Any]:
    trigger = schedule.trigger
    found = trigger and (trigger.cron_schedule or trigger.periodic_schedule)
    return found.to_dict() if found else {}
