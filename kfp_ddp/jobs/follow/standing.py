"""Why pods do not start, since when each reason stands, and which reasons end the job; pure."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Object
from kfp_ddp.k8s.objects import every_container

# How long a reason may stand, in seconds, before the job is ended for it. The others have no end
# but pending_minutes: a node, a claim or a queue may be free tomorrow.
FINAL_AFTER = {
    "invalid image name": 5.0,
    "image not on the node": 60.0,
    "image refused": 60.0,  # the registry answers, and has none or gives none
    "image": 20 * 60.0,  # it does not answer: it may be down
    "configuration": 60.0,  # a Secret or ConfigMap that is not there, a user that is refused
    "container": 5 * 60.0,  # the container runtime cannot: its node may be overloaded
    "forbidden": 60.0,
    "quota": 60.0,  # or pending_minutes where those are given: others may give it back
}
MAY_PASS = ("quota", "image")

PULL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
FAILED = ("FailedCreatePod", "FailedCreate")
CONFIG = "CreateContainerConfigError"
START = ("CreateContainerError", "RunContainerError")
REFUSED = re.compile(
    r"not found|does not exist|unauthorized|authentication required|denied|forbidden"
    r"|manifest unknown|no match for platform|invalid reference format",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"forbidden|denied the request|is invalid", re.IGNORECASE)


class Reason(NamedTuple):
    """Why a pod does not start: a kind, a row of FINAL_AFTER or another word, and a line."""

    kind: str
    text: str


@dataclass(frozen=True)
class Stands:
    """A reason, whose it is, and since when on the monotonic clock."""

    who: str
    reason: Reason
    since: float

    def __str__(self) -> str:
        return f"{self.who}: {self.reason.text}"


def of_containers(pod: Object) -> Reason | None:
    """What keeps a container of a pod from starting, by its status; None for nothing."""
    for container in every_container(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        why, message = waiting.get("reason", ""), one_line(str(waiting.get("message", "")))
        pull = f"cannot pull {container.get('image')} ({why}: {message})"
        if why == "InvalidImageName":
            return Reason("invalid image name", f"{pull}; correct it")
        if why == "ErrImageNeverPull":
            return Reason("image not on the node", f"{pull}; let image_pull_policy pull it")
        if why in PULL:
            kind = "image refused" if REFUSED.search(message) else "image"
            return Reason(kind, f"{pull}; check its name and image_pull_secrets")
        if why == CONFIG or why in START:
            hint = "; set run_as_user, or non_root=false" if "runAsNonRoot" in message else ""
            kind = "configuration" if why == CONFIG else "container"
            return Reason(kind, f"cannot start ({why}: {message}){hint}")
    return None


def of_events(events: Iterable[Object]) -> Reason | None:
    """What keeps the pods of a job from being made, by the newest that tells of it."""
    failed = [each for each in events if each.get("reason") in FAILED]
    return of_refusal(str(max(failed, key=_last).get("message", ""))) if failed else None


def of_refusal(said: str) -> Reason:
    """The reason in what the API server says of a pod that it does not take."""
    message, kind = one_line(said), "no pods"
    if "quota" in message:
        kind = "quota"
    elif FORBIDDEN.search(message):
        kind = "forbidden"
    return Reason(kind, message)


def _last(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def still(
    before: Mapping[str, Stands], reasons: Mapping[str, Reason], clock: float
) -> dict[str, Stands]:
    """What stands now, by pod, each since it was first seen.

    The kubelet says in turn why a pull failed, and that it waits before the next one.
    """
    found = {}
    for who, reason in reasons.items():
        earlier = before.get(who)
        if earlier is None or _group(earlier.reason) != _group(reason):
            found[who] = Stands(who, reason, clock)
        elif REFUSED.search(earlier.reason.text) and not REFUSED.search(reason.text):
            found[who] = earlier
        else:
            found[who] = Stands(who, reason, earlier.since)
    return found


def _group(reason: Reason) -> str:
    return reason.kind.removesuffix(" refused")


def final(standing: Iterable[Stands], clock: float, pending: float) -> Stands | None:
    """The reason that has stood too long, the oldest of several; None while all may pass.

    `pending` is how long pods may wait for what may pass, in seconds; 0 where nobody said.
    """
    late = [each for each in standing if clock - each.since >= _limit(each.reason, pending)]
    return oldest(late)


def _limit(reason: Reason, pending: float) -> float:
    limit = FINAL_AFTER.get(reason.kind, math.inf)
    return pending if pending and reason.kind in MAY_PASS else limit


def oldest(standing: Iterable[Stands]) -> Stands | None:
    """The reason that has stood longest; None of none."""
    return min(standing, key=lambda each: each.since, default=None)
