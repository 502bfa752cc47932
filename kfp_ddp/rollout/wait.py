"""The wait until a service is ready: stops early for a reason that will not pass."""

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kfp_ddp.core.errors import JobError, RunCancelledError
from kfp_ddp.core.log import log
from kfp_ddp.core.text import one_line
from kfp_ddp.jobs.ending import terminated
from kfp_ddp.jobs.failure import error_in_log
from kfp_ddp.jobs.identity import find_owner
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.objects import all_container_statuses, condition, conditions, has_ended, part
from kfp_ddp.k8s.objects import label as pod_label
from kfp_ddp.k8s.pods import FINAL_AFTER, Reason, Wait, container_reason, track, waiting_reason
from kfp_ddp.k8s.resource import EVENTS, PODS, WORKFLOWS
from kfp_ddp.k8s.watch_cache import WatchCache
from kfp_ddp.rollout.rollout import (
    CANARY,
    POD_OF,
    SERVICES,
    SPEC,
    Service,
    has_canary,
    spec_labels,
)

CRASHES = 3
"""Number of exits of one container after which the wait ends."""
CRASHING = "crash"
REFUSED = "refused by KServe"
LIMITS = {**FINAL_AFTER, CRASHING: 0.0, REFUSED: 60.0}
"""Seconds that a reason may last before it ends the rollout."""
# A Deployment has these reasons until its first pod is ready.
_STARTING = ("MinimumReplicasUnavailable", "Deploying", "ContainerMissing", "Uninitialized")
_OF_PREDICTOR = ("LatestDeploymentReady", "PredictorConfigurationReady", "PredictorReady")
_FAULTY = ("InvalidSpec", "BlockedByFailedLoad")
_TURN_SECONDS = 0.5
_LOG_LINES = "50"


def live_pods(pods: Iterable[Object]) -> list[Object]:
    """Return the pods that have not ended and are not being deleted."""
    running = (pod for pod in pods if not has_ended(pod))
    return [pod for pod in running if "deletionTimestamp" not in pod["metadata"]]


def pods_of_spec(pods: Iterable[Object], spec: str) -> list[Object]:
    """Return the live pods of the predictor with this label."""
    return [pod for pod in live_pods(pods) if pod_label(pod, SPEC) == spec]


def ready(service: Object, pods: Sequence[Object], spec: str) -> bool:
    """Return whether requests for the predictor with this label reach it, and only it."""
    own = pods_of_spec(pods, spec)
    answers = any(condition(pod, "Ready") for pod in own)
    if has_canary(service, spec):
        return answers
    if not condition(service, "Ready") or not answers:
        return False
    predictor = predictor_status(service)
    if newest := predictor.get("latestCreatedRevision"):
        # Knative routes to the newest revision that is ready; pods of others stay for minutes.
        return bool(newest == predictor.get("latestReadyRevision"))
    return own == live_pods(pods)


def predictor_status(service: Object) -> Object:
    """Return the predictor's part of the service's status."""
    return part(service, "status", "components", "predictor")


def crashed(pods: Iterable[Object]) -> tuple[str, str, int] | None:
    """Return pod, name and exit code of the first container that exited too often."""
    for pod in pods:
        for status in all_container_statuses(pod):
            ended = part(status, "lastState", "terminated")
            if ended and int(status.get("restartCount", 0)) >= CRASHES:
                return pod["metadata"]["name"], status["name"], int(ended.get("exitCode", 0))
    return None


def reasons(service: Object, pods: Iterable[Object]) -> dict[str, Reason]:
    """Return why pods do not start, by pod name, or why KServe does not create any."""
    by_pod = {pod["metadata"]["name"]: why for pod in pods if (why := container_reason(pod))}
    if by_pod:
        return by_pod
    refusal = _refusal(service)
    return {"KServe": Reason(REFUSED, one_line(refusal))} if refusal else {}


def _refusal(service: Object) -> str:
    """Return why KServe or Knative refuse a predictor; '' if they do not."""
    model = part(service, "status", "modelStatus")
    last = part(model, "lastFailureInfo")
    says_why = last.get("message") or last.get("reason")
    if says_why and model.get("transitionStatus") in _FAULTY:
        return f"{last.get('reason', 'refused')}: {last.get('message', '')}".strip(": ")
    for kind in _OF_PREDICTOR:
        failed = condition(service, kind, "False")
        if failed and failed.get("reason") not in _STARTING:
            return f"{failed.get('reason') or kind}: {failed.get('message', '')}".strip(": ")
    return ""


def waits_for(service: Object, pods: Sequence[Object]) -> str:
    """Return what the service waits for, as text, if nothing blocks it."""
    if not pods:
        return "KServe to make its pods"
    for pod in pods:
        reason = waiting_reason(pod)
        if reason and reason.kind:
            return f"{pod['metadata']['name']}: {reason.text}"
    missing = [
        f"{one['type']}: {one.get('message') or one.get('reason') or 'not yet'}"
        for one in conditions(service)
        if one["status"] != "True" and one.get("severity") != "Info"
    ]
    return one_line("; ".join(missing)) or "its pods"


class ServiceWatch:
    """Watches of a service, its pods and the run's Workflow."""

    def __init__(self, api: Api, service: Service) -> None:
        self.api = api
        self.service = service
        self.changed = threading.Event()
        by_name = {"fieldSelector": f"metadata.name={service.name}"}
        by_label = {"labelSelector": f"{POD_OF}={service.name}"}
        self._services = WatchCache(api, SERVICES, by_name, self.changed)
        self._pods = WatchCache(api, PODS, by_label, self.changed)
        self._all = [self._services, self._pods]
        self._workflows: WatchCache | None = None
        if owner := find_owner(api):
            by_name = {"fieldSelector": f"metadata.name={owner.workflow}"}
            self._workflows = WatchCache(api, WORKFLOWS, by_name, self.changed)
            self._all.append(self._workflows)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the duration of a `with` block."""
        for watch in self._all:
            watch.start()
        try:
            yield
        finally:
            for watch in self._all:
                watch.stop()

    def leave_if_cancelled(self) -> None:
        """Raise RunCancelledError if the run was terminated."""
        workflows = self._workflows.objects.values() if self._workflows else ()
        if any(map(terminated, workflows)):
            raise RunCancelledError("the run was terminated")

    def until_ready(self, spec: str, seconds: float) -> Object:
        """Wait until requests reach the predictor, or raise JobError; return the service."""
        start = time.monotonic()
        blocked: dict[str, Wait] = {}
        waits = "the cluster to list its pods"
        reported = ""
        while True:
            self.changed.wait(timeout=_TURN_SECONDS)
            self.changed.clear()
            self.leave_if_cancelled()
            current = self._current(spec)
            if current is not None:
                service, pods, own = current
                if ready(service, pods, spec):
                    return service
                if has_canary(service, spec):
                    self._check_pods_of_canary(own, start)
                    service = {}  # its status is that of the stable predictor
                blocked = self._still_blocked(blocked, service, own)
                waits = "; ".join(map(str, blocked.values())) or waits_for(service, own)
                # A failing image pull alternates between two reasons; it is printed once.
                news = str([(wait.who, wait.since) for wait in blocked.values()] or waits)
                if news != reported:
                    reported = news
                    log.info(f"{self.service.name} waits for {waits}")
            if time.monotonic() > start + seconds:
                raise JobError(
                    f"InferenceService {self.service.name} is not ready after "
                    f"{seconds / 60:g} minutes, it waits for {waits}"
                )

    def _check_pods_of_canary(self, pods: Sequence[Object], start: float) -> None:
        """Raise JobError if KServe made no pods of a canary for too long."""
        if not pods and time.monotonic() > start + LIMITS[REFUSED]:
            raise JobError(f"{self.service.name} gets no pod{self._warning()}")

    def _still_blocked(
        self, blocked: dict[str, Wait], service: Object, pods: Sequence[Object]
    ) -> dict[str, Wait]:
        """Return what blocks the predictor, and since when; raise JobError if it will not pass."""
        now = time.monotonic()
        blocked = track(blocked, self._blocking(service, pods), now)
        for wait in blocked.values():
            if now - wait.since >= LIMITS.get(wait.reason.kind, math.inf):
                raise JobError(f"{self.service.name} does not become ready: {wait}")
        return blocked

    def _current(self, spec: str) -> tuple[Object, list[Object], list[Object]] | None:
        """Return the service, its pods, and those of the predictor; None before the first list."""
        for watch in (self._services, self._pods):
            if watch.forbidden:
                raise JobError(f"{watch.forbidden}; apply deploy/rbac")
        if not (self._services.synced.is_set() and self._pods.synced.is_set()):
            return None
        service = next(iter(self._services.objects.values()), None)
        if service is None or spec not in spec_labels(service):
            # The watch may be older than the applied change.
            existing = self.service.find()
            if existing is None or spec not in spec_labels(existing):
                raise self.service.taken_over(existing)
            return None
        pods = list(self._pods.objects.values())
        return service, pods, pods_of_spec(pods, spec)

    def _blocking(self, service: Object, pods: Sequence[Object]) -> dict[str, Reason]:
        crash = crashed(pods)
        if crash is None:
            return reasons(service, pods)
        pod, container, code = crash
        query = {"container": container, "previous": "true", "tailLines": _LOG_LINES}
        path = PODS.path(self.api.namespace, pod) + "/log"
        content = ""
        with suppress(ApiError):
            content = str(self.api.call("GET", path, query=query, raw=True)["value"])
        text = f"{container} exits repeatedly with exit code {code}"
        if cause := error_in_log(content.splitlines()).text:
            text += f": {cause}"
        return {pod: Reason(CRASHING, text)}

    def _warning(self) -> str:
        """Return why KServe makes no pods of a canary, which only events tell."""
        name = self.service.name
        try:
            events = self.api.list_objects(EVENTS, {"fieldSelector": "type=Warning"})
        except ApiError:
            return ""
        objects = (f"{name}-{CANARY}-", f"{name}--")
        of_canary = [
            event for event in events if f"{event['involvedObject']['name']}-".startswith(objects)
        ]
        if not of_canary:
            return ""
        newest = max(of_canary, key=lambda event: event.get("lastTimestamp") or "")
        return f": {one_line(newest['message'])}"
