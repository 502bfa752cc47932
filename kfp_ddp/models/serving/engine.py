"""The deploy step: roll out a published bundle on an InferenceService, or roll it back."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.core.errors import JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.models.champion import open_bundle, read_pointer
from kfp_ddp.models.interface import Sample
from kfp_ddp.models.release import Deployment, part_of
from kfp_ddp.models.serving.canary import address, check_canary, sample_of
from kfp_ddp.models.serving.inference_service import manifest, served_name
from kfp_ddp.models.serving.rollout import (
    SPEC,
    VERSION,
    Service,
    canary_predictor,
    has_canary,
    is_unfinished,
    label,
    labelled,
    previous_of,
    stable_of,
)
from kfp_ddp.models.serving.wait import ServiceWatch
from kfp_ddp.storage.kinds import open_store

if TYPE_CHECKING:
    from kfp import dsl

ALL = 100


@step
def run(
    *,
    bundle: str,
    model_name: str,
    release: Mapping[str, Any],
    run_id: str,
    deploy_report: "dsl.Markdown",
) -> tuple[str, str]:
    """Roll out the bundle; return the service's URL in the cluster, and its version, or ''."""
    settings = part_of(release, Deployment)
    url, version, result = "", "", "no service is named in release: nothing was rolled out"
    if settings.service and not bundle:
        result = "nothing was uploaded, so there is nothing to roll out"
    elif settings.service and (other := _other_champion(bundle)):
        result = f"{bundle} is not rolled out: {other} is the champion now"
    elif settings.service:
        url, version, result = roll_out(Api.connect(), settings, bundle, model_name, run_id)
    print(result, flush=True)
    Path(deploy_report.path).write_text(f"{cell(result)}\n", encoding="utf-8")
    deploy_report.metadata.update({"service": settings.service, "url": url, "version": version})
    return url, version


def roll_out(
    api: Api, settings: Deployment, uri: str, model_name: str, run_id: str
) -> tuple[str, str, str]:
    """Deploy and test the bundle, then give it all requests; return URL, version and result.

    InputError: nothing was changed. JobError, RunCancelledError: the previous model was restored.
    """
    bundle = open_bundle(uri, "publish it again")
    uri, sample = bundle.uri, sample_of(bundle)
    desired = labelled(_predictor(settings, uri, model_name), bundle.version, uri, run_id)
    rollout = Rollout(api, settings, desired, sample)
    model = served_name(settings.service, model_name, settings.service_runtime)
    with rollout.watched.watching():
        url, seconds = rollout.run(model)
    how = "answers" if rollout.is_unfinished else "already answered, and still does"
    result = (
        f"InferenceService {settings.service} {how} with {model_name} {bundle.version} at {url}: "
        f"the bundle's sample {settings.canary_requests} times correctly, "
        f"{seconds * 1e3:.0f} ms each"
    )
    return url, bundle.version, result


def _other_champion(uri: str) -> str:
    """Return the version that is the champion instead of this bundle; '' for none."""
    models, _, version = uri.rstrip("/").rpartition("/")
    champion = read_pointer(open_store(models))
    return champion if champion != version else ""


def _predictor(settings: Deployment, uri: str, model_name: str) -> Object:
    amounts = {"cpu": settings.service_cpu, "memory": settings.service_memory}
    service = manifest(
        settings.service,
        uri,
        model_name,
        settings.service_runtime,
        image=settings.service_image,
        resources={"requests": amounts, "limits": amounts},
        service_account=settings.service_account,
    )
    scaled = {"maxReplicas": most} if (most := settings.service_max_replicas) else {}
    return {**stable_of(service), "minReplicas": settings.service_replicas, **scaled}


class Rollout:
    """A rollout from its start, until it succeeds or is rolled back."""

    def __init__(self, api: Api, settings: Deployment, desired: Object, sample: Sample) -> None:
        self.settings, self.sample = settings, sample
        self.service = Service(api, settings.service)
        self.desired = desired = self.service.with_pre_stop(desired)
        self._continue(self.service.begin(desired, settings.canary_percent))
        self.watched = ServiceWatch(api, self.service)

    def _continue(self, service: Object) -> None:
        """Take the state of the rollout from the service."""
        self.predictor, self.previous = stable_of(service), previous_of(service)
        self.spec = label(canary_predictor(self.desired), SPEC)
        self.has_canary = has_canary(service, self.spec)
        if not self.has_canary:
            self.spec = label(self.predictor, SPEC)
        self.is_unfinished = self.has_canary or is_unfinished(service)

    def run(self, model: str) -> tuple[str, float]:
        """Test the model, then promote it or roll back; return the URL and the median seconds."""
        percent = self.settings.canary_percent
        try:
            if self.has_canary:
                self._try(model, percent)
                self.watched.leave_if_cancelled()
                self._continue(self.service.promote(self.desired, percent))
            seconds = self._try(model, percent if self.is_unfinished else ALL)
            if self.is_unfinished:
                self.watched.leave_if_cancelled()
                self.service.finish(self.predictor, self.previous)
            return address(self._wait(ALL)), seconds
        except KfpDdpError as error:
            if not self.is_unfinished:
                raise
            try:
                result = self.service.roll_back(self.spec)
            except KfpDdpError as failed:
                result = str(failed)
            kind = RunCancelledError if isinstance(error, RunCancelledError) else JobError
            failure = kind(f"{error}; {result}")
            cancelled = kind is RunCancelledError
        if not cancelled:
            self._unpin()
        raise failure

    def _try(self, model: str, percent: int) -> float:
        url = address(self._wait(percent), self.spec)
        print(f"testing {url}", flush=True)
        times, seconds = self.settings.canary_requests, self.settings.canary_seconds
        check = self.watched.leave_if_cancelled
        return check_canary(url, model, self.sample, times, seconds, check)

    def _wait(self, percent: int) -> Object:
        return self.watched.until_ready(self.spec, percent, self.settings.service_minutes * 60)

    def _unpin(self) -> None:
        """Remove the share of the restored predictor when it is ready; it has all requests."""
        if self.previous is None or self.has_canary:
            return
        spec = label(self.previous, SPEC)
        try:
            self.watched.until_ready(spec, 0, self.settings.service_minutes * 60)
            self.service.finish(self.previous, None)
        except KfpDdpError as error:
            version = label(self.previous, VERSION)
            print(f"warning: {self.service.name} remains pinned to {version}: {error}", flush=True)
