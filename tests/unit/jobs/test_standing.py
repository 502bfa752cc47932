"""Which reasons end a job that cannot start, after what time, and how they get into its error."""

from typing import Any

import pytest

from kfp_ddp.jobs.failure import cause_in_pods
from kfp_ddp.jobs.follow import narrator
from kfp_ddp.jobs.kinds.base import State
from kfp_ddp.k8s.api import ApiError, Object
from kfp_ddp.k8s.pods import (
    CRASHES,
    FINAL_AFTER,
    NO_CAUSE,
    Reason,
    Wait,
    container_reason,
    creation_reason,
    expired,
    track,
)
from kfp_ddp.k8s.resource import PODS
from tests.cluster import FakeApi, ended, pod, waiting

UNKNOWN = 'failed to resolve reference "ghcr.io/a/b:1": ghcr.io/a/b:1: not found'
NO_ANSWER = 'failed to do request: Head "https://ghcr.io/v2/": dial tcp: i/o timeout'
BACK_OFF = f"cannot pull a:1 (ImagePullBackOff: Back-off); {NO_CAUSE[1]}"


def waits(reason: str, message: str, where: str = "containerStatuses") -> Object:
    return pod("worker-0", waiting(reason, message), where=where)


@pytest.mark.parametrize("where", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize(
    ("reason", "message", "kind", "seconds"),
    [
        ("InvalidImageName", "couldn't parse image name", "invalid image name", 5),
        ("ErrImageNeverPull", "is not present with pull policy of Never", "image not on", 60),
        ("ErrImagePull", UNKNOWN, "image refused", 60),
        ("ErrImagePull", "pull access denied, repository does not exist", "image refused", 60),
        ("ErrImagePull", NO_ANSWER, "image", 1200),
        ("ImagePullBackOff", "Back-off pulling image", "image", 1200),
        ("CreateContainerConfigError", 'secret "s" not found', "configuration", 60),
        ("RunContainerError", "exec: not found", "container", 300),
        ("CrashLoopBackOff", "back-off 10s restarting failed container", "container", 300),
        ("ImagePullProgressError", "401 Unauthorized", "image refused", 60),
        ("ReasonOfTomorrow", "", "container", 300),
        ("ContainerCreating", "", None, 0),
    ],
)
def test_limits_of_the_reasons_why_a_container_waits(
    where: str, reason: str, message: str, kind: str | None, seconds: float
) -> None:
    result = container_reason(waits(reason, message, where))
    if kind is None:
        assert result is None
        return
    assert result is not None
    assert result.kind.startswith(kind)
    assert FINAL_AFTER[result.kind] == seconds
    assert reason in result.text


def test_a_container_that_crashes_again_and_again_is_not_waited_for() -> None:
    crashed = waits("CrashLoopBackOff", "back-off 5m0s", "initContainerStatuses")
    (status,) = crashed["status"]["initContainerStatuses"]
    status |= {"restartCount": CRASHES, "lastState": ended(3, "no route")}
    result = container_reason(crashed)
    assert result
    assert FINAL_AFTER[result.kind] < 60
    assert "exit code 3: no route" in result.text


@pytest.mark.parametrize(
    ("message", "kind", "remedy"),
    [
        ("toomanyrequests: You have reached your pull rate limit", "image", "limits pulls"),
        (f"{'x' * 300} x509: certificate has expired", "image refused", "certificate"),
        ("write /var/x: no space left on device", "image", "disk"),
        ("unauthorized: authentication required", "image refused", "image_pull_secrets"),
        ("no match for platform in manifest", "image refused", "platform"),
        (UNKNOWN, "image refused", "correct its name"),
        (NO_ANSWER, "image", "reach the registry"),
        ('Back-off pulling image "r/x509:1"', *NO_CAUSE),
    ],
)
def test_a_failed_pull_has_a_remedy_by_its_cause(message: str, kind: str, remedy: str) -> None:
    status = waits("ErrImagePull", message)
    status["status"]["containerStatuses"][0]["image"] = "r/denied:1"
    result = container_reason(status)
    assert result
    assert (result.kind, remedy in result.text.rpartition("; ")[2]) == (kind, True)


QUOTA = 'pods "x" is forbidden: exceeded quota: q, requested: cpu=2, used: cpu=3, limited: cpu=4'
NO_LIMITS = 'pods "x" is forbidden: failed quota: q: must specify limits.cpu'
RESTRICTED = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
WEBHOOK = 'admission webhook "policy.example.com" denied the request: no such team'


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        *((QUOTA, "quota"), (NO_LIMITS, "quota"), (RESTRICTED, "forbidden")),
        *((WEBHOOK, "forbidden"), ("etcdserver: request timed out", "no pods")),
    ],
)
def test_the_newest_event_shows_why_pods_are_not_created(message: str, kind: str) -> None:
    events = [
        {"reason": "RestartPolicy", "message": "so", "lastTimestamp": "2026-01-01T00:00:09Z"},
        {"reason": "FailedCreatePod", "message": message, "lastTimestamp": "2026-01-01T00:00:02Z"},
        {"reason": "FailedCreate", "message": "older", "lastTimestamp": "2026-01-01T00:00:01Z"},
    ]
    assert creation_reason(events) == Reason(kind, message)
    assert creation_reason(events[:1]) is None
    api: Any = None
    present = waits("ContainerCreating", "")
    present["status"]["phase"] = "Running"
    for pods, who in (([], "no pods yet"), ([present], "1 of 2 pods")):
        result = narrator.explain({}, State("created"), pods, events, api, 2)
        assert result == {who: Reason(kind, message)}
    assert narrator.explain({}, State("created"), [present], events, api, 1) == {}


JOB: dict[str, Any] = {
    "metadata": {"name": "x"},
    "spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"metadata": {}, "spec": {}}}}},
}


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (403, RESTRICTED, "forbidden"),
        (403, QUOTA, "quota"),
        (403, 'pods is forbidden: User "a" cannot create resource "pods"', ""),
        (400, "admission webhook does not support dry run", ""),
        (0, "no answer", ""),
    ],
)
def test_a_dry_run_shows_why_pods_are_refused(status: int, message: str, kind: str) -> None:
    api = FakeApi({PODS.path("space"): ApiError(status, "", message)})
    result = narrator.explain(JOB, State("created"), [], None, api, 2)
    assert api.queries == [{"dryRun": "All"}]
    assert result["no pods yet"].kind == kind


def stood(*seen: tuple[float, str, str], pending: float = 0, at: float = 0) -> str:
    """The kind of the reason that has stood too long, after looks at a pod at these times."""
    before: dict[str, Wait] = {}
    for clock, kind, text in seen:
        before = track(before, {"worker-0": Reason(kind, text)} if kind else {}, clock)
    result = expired(before.values(), at or seen[-1][0], pending)
    return result.reason.kind if result else ""


@pytest.mark.parametrize(
    ("seen", "pending", "kind"),
    [
        ([(0, "configuration", "x"), (59, "configuration", "x")], 0, ""),
        ([(0, "configuration", "x"), (60, "configuration", "x")], 0, "configuration"),
        ([(0, "configuration", "x"), (50, "", ""), (60, "configuration", "x")], 0, ""),
        ([(0, "configuration", "x"), (30, "image", "y"), (60, "image", "y")], 0, ""),
        ([(0, "invalid image name", "x"), (5, "invalid image name", "x")], 0, "invalid image name"),
        # The kubelet waits in turn, and does not always say again what for.
        ([(0, "image refused", UNKNOWN), (60, "image", BACK_OFF)], 0, "image refused"),
        ([(0, "image", NO_ANSWER), (1200, "image", BACK_OFF)], 0, "image"),
        ([(0, "image", NO_ANSWER), (1100, "image refused", UNKNOWN)], 0, "image refused"),
        # What may pass has as long as the user says, be it more or less.
        ([(0, "image", NO_ANSWER), (1200, "image", NO_ANSWER)], 7200, ""),
        ([(0, "quota", QUOTA), (60, "quota", QUOTA)], 0, "quota"),
        ([(0, "quota", QUOTA), (60, "quota", QUOTA)], 600, ""),
        ([(0, "forbidden", RESTRICTED), (60, "forbidden", RESTRICTED)], 600, "forbidden"),
        ([(0, "unschedulable", "no node"), (99999, "unschedulable", "no node")], 0, ""),
    ],
)
def test_limit_of_a_reason(seen: list[tuple[float, str, str]], pending: float, kind: str) -> None:
    assert stood(*seen, pending=pending) == kind


def test_the_oldest_reason_is_reported() -> None:
    before = track({}, {"b": Reason("configuration", "first")}, 1)
    both = {"a": Reason("forbidden", "second"), "b": Reason("configuration", "first")}
    result = expired(track(before, both, 2).values(), 99, 0)
    assert str(result) == "b: first"


def failed(code: int, message: str, where: str = "containerStatuses") -> Object:
    return pod("worker-1", ended(code, message), where=where)


@pytest.mark.parametrize(
    ("pods", "error", "retryable"),
    [
        ([], "worker-0: no secret (it never started)", False),
        ([failed(1, "timed out waiting 5ms")], "worker-0: no secret (it never started)", True),
        ([failed(1, "key")], "worker-1: exit code 1: key; besides, worker-0: no secret", False),
    ],
)
def test_cause_is_pending(pods: list[dict[str, Any]], error: str, retryable: bool) -> None:
    """The operator itself says no more than that a worker failed."""
    result = cause_in_pods(pods, "1 Worker replica(s) failed", never_started="worker-0: no secret")
    assert (result.error, result.retryable) == (error, retryable)


def test_an_init_container_that_fails_is_a_cause() -> None:
    result = cause_in_pods([failed(1, "no route", "initContainerStatuses")], "1 replica(s) failed")
    assert result.error == "worker-1: exit code 1: no route"
