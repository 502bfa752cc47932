"""The wait for a service to be ready with a predictor: ended early by what will not pass."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kfp_ddp.core.errors import JobError, RunCancelledError
from kfp_ddp.jobs.ending import terminated
from kfp_ddp.jobs.failure import error_in_log
from kfp_ddp.jobs.identity import WORKFLOWS, find_owner
from kfp_ddp.k8s.api import Api, ApiError, Object, core, custom
from kfp_ddp.k8s.pods import Reason, Wait, track
from kfp_ddp.k8s.watch_cache import WatchCache
from kfp_ddp.models.serving import standing
from kfp_ddp.models.serving.inference_service import API_VERSION
from kfp_ddp.models.serving.rollout import PLURAL, POD_OF, SPEC, Service, label, predictor_of

_TURN_SECONDS = 0.5
_TOLD_LINES = "50"


class Watched:
    """A service, its pods and the run's Workflow, as the cluster has them now."""

    def __init__(self, api: Api, service: Service) -> None:
        self.api, self.service = api, service
        self.changed = threading.Event()
        named = {"fieldSelector": f"metadata.name={service.name}"}
        its = {"labelSelector": f"{POD_OF}={service.name}"}
        services = custom(API_VERSION, api.namespace, PLURAL)
        self._services = WatchCache(api, services, named, self.changed)
        self._pods = WatchCache(api, core(api.namespace, "pods"), its, self.changed)
        self._all = [self._services, self._pods]
        self._workflows: WatchCache | None = None
        if owner := find_owner(api):
            one = {"fieldSelector": f"metadata.name={owner.workflow}"}
            workflows = custom(WORKFLOWS, api.namespace, "workflows")
            self._workflows = WatchCache(api, workflows, one, self.changed)
            self._all.append(self._workflows)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the length of a `with` block."""
        for each in self._all:
            each.start()
        try:
            yield
        finally:
            for each in self._all:
                each.stop()

    def leave_if_cancelled(self) -> None:
        """Leave where nobody wants the service's new model any more.

        Raises:
            RunCancelledError: the run was terminated.
        """
        workflows = self._workflows.objects.values() if self._workflows else ()
        if any(map(terminated, workflows)):
            raise RunCancelledError("the run was terminated")

    def until_ready(self, spec: str, percent: int, seconds: float) -> Object:
        """The service as soon as requests reach the predictor with this label.

        Args:
            spec: The label.
            percent: Share of the requests that it is to have, where KServe shares them out.
            seconds: The longest wait.

        Raises:
            JobError: what keeps it from getting ready, or that it takes longer.
            RunCancelledError: the run was terminated.
        """
        deadline, waits, told = time.monotonic() + seconds, "", ""
        stands: dict[str, Wait] = {}
        while True:
            self.changed.wait(timeout=_TURN_SECONDS)
            self.changed.clear()
            self.leave_if_cancelled()
            look = self._look(spec)
            if look is not None:
                service, pods, own = look
                if standing.ready(service, pods, spec, percent):
                    return service
                now = time.monotonic()
                stands = track(stands, self._against(service, own), now)
                self._give_up(stands, now)
                waits = "; ".join(map(str, stands.values())) or standing.waits_for(service, own)
                # A pull that fails is told in turns as that and as the pause before the next.
                news = str([(each.who, each.since) for each in stands.values()] or waits)
                if news != told:
                    told = news
                    print(f"{self.service.name} waits for {waits}", flush=True)
            if time.monotonic() > deadline:
                raise JobError(
                    f"InferenceService {self.service.name} is not ready after "
                    f"{seconds / 60:g} minutes{waits and f', it waits for {waits}'}"
                )

    def _look(self, spec: str) -> tuple[Object, list[Object], list[Object]] | None:
        """The service, its pods, and those of the predictor; None before the first answer.

        Raises:
            JobError: the service is gone, or has another predictor.
        """
        for watch in (self._services, self._pods):
            if watch.forbidden:
                raise JobError(f"{watch.forbidden}; apply deploy/rbac")
        if not (self._services.synced.is_set() and self._pods.synced.is_set()):
            return None
        found = next(iter(self._services.objects.values()), None)
        if found is None or label(predictor_of(found), SPEC) != spec:
            # The watch may be behind what was applied.
            there = self.service.find()
            if there is None or label(predictor_of(there), SPEC) != spec:
                raise self.service.taken_over(there)
            return None
        pods = list(self._pods.objects.values())
        return found, pods, standing.of_spec(pods, spec)

    def _against(self, service: Object, pods: Sequence[Object]) -> dict[str, Reason]:
        if (crash := standing.crashed(pods)) is None:
            return standing.reasons(service, pods)
        said = f"{crash.container} ends again and again with exit code {crash.code}"
        said += f": {words}" if (words := self._last_words(crash)) else ""
        return {crash.pod: Reason(standing.CRASHING, said)}

    def _last_words(self, crash: standing.Crashed) -> str:
        query = {"container": crash.container, "previous": "true", "tailLines": _TOLD_LINES}
        path = core(self.api.namespace, "pods", crash.pod) + "/log"
        try:
            log = str(self.api.call("GET", path, query=query, raw=True)["value"])
        except ApiError:
            return ""
        return error_in_log(log.splitlines()).text

    def _give_up(self, stands: dict[str, Wait], now: float) -> None:
        """End the wait for a reason that has stood too long; a registry may be down for longer."""
        for each in stands.values():
            limit = standing.LIMITS.get(each.reason.kind)
            if limit is not None and now - each.since >= limit:
                raise JobError(f"{self.service.name} does not get ready: {each}")
