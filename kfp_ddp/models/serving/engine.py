"""The deploy step: roll out a published bundle on an InferenceService, or roll it back."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.step import step
from kfp_ddp.core.text import cell
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.models.champion import read_pointer
from kfp_ddp.models.release import Deployment, part_of
from kfp_ddp.models.serving.canary import Sample, address, try_out
from kfp_ddp.models.serving.inference_service import manifest, served_name
from kfp_ddp.models.serving.rollout import (
    SPEC,
    VERSION,
    Service,
    before,
    label,
    on_trial,
    predictor_of,
    signed,
)
from kfp_ddp.models.serving.wait import Watched
from kfp_ddp.storage.kinds import open_store

if TYPE_CHECKING:
    from kfp import dsl

ALL = 100


class Deployed(NamedTuple):
    """URL of the service inside the cluster, '' for none, and the version that it serves."""

    url: str
    version: str


@step
def run(
    *,
    bundle: str,
    model_name: str,
    release: Mapping[str, Any],
    run_id: str,
    deploy_report: "dsl.Markdown",
) -> Deployed:
    """Roll out the bundle and write the result to the artifact."""
    settings = part_of(release, Deployment)
    deployed, result = Deployed("", ""), "no service is named in release: nothing was rolled out"
    if settings.service and not bundle:
        result = "nothing was uploaded, so there is nothing to roll out"
    elif settings.service and (other := _other_champion(bundle)):
        result = f"{bundle} is not rolled out: {other} is the champion now"
    elif settings.service:
        api = Api.connect()
        deployed, result = roll_out(api, settings, bundle, model_name, run_id)
    print(result, flush=True)
    Path(deploy_report.path).write_text(f"{cell(result)}\n", encoding="utf-8")
    deploy_report.metadata.update({"service": settings.service, **deployed._asdict()})
    return deployed


def roll_out(
    api: Api, settings: Deployment, uri: str, model_name: str, run_id: str
) -> tuple[Deployed, str]:
    """Deploy the bundle: start a trial, test it with its sample, then give it all requests.

    Returns:
        The deployment, and the result as text.

    Raises:
        InputError: invalid input; nothing was changed.
        JobError: it is not ready or answers incorrectly; the previous model was restored.
        RunCancelledError: the run was terminated; the previous model was restored.
    """
    bundle = _bundle(uri)
    sample = Sample.of(bundle)
    desired = signed(_predictor(settings, uri, model_name), bundle.version, uri, run_id)
    service = Service(api, settings.service)
    started = service.begin(desired, settings.canary_percent)
    rollout = Rollout(api, service, started, settings, sample)
    model = served_name(settings.service, model_name, settings.service_runtime)
    with rollout.watched.watching():
        url, seconds = rollout.run(model)
    how = "answers" if rollout.begun else "already answered, and still does"
    result = (
        f"InferenceService {settings.service} {how} with {model_name} {bundle.version} at {url}: "
        f"the bundle's sample {settings.canary_requests} times correctly, "
        f"{seconds * 1e3:.0f} ms each"
    )
    return Deployed(url, bundle.version), result


def _other_champion(uri: str) -> str:
    """Return the version that is the champion instead of this bundle; '' for none."""
    models, _, version = uri.rstrip("/").rpartition("/")
    champion = read_pointer(open_store(models))
    return champion if champion != version else ""


def _bundle(uri: str) -> Bundle:
    bundle = Bundle.at(open_store(uri), advice="publish it again")
    if bundle.listed is None:
        raise InputError(f"there is no bundle at {uri}: give the output of publish")
    return bundle


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
    return {**predictor_of(service), "minReplicas": settings.service_replicas}


class Rollout:
    """A started rollout, until it succeeds or is rolled back."""

    def __init__(
        self, api: Api, service: Service, started: Object, settings: Deployment, sample: Sample
    ) -> None:
        self.service, self.settings, self.sample = service, settings, sample
        self.predictor, self.former = predictor_of(started), before(started)
        self.spec, self.begun = label(self.predictor, SPEC), on_trial(started)
        self.watched = Watched(api, service)

    def run(self, model: str) -> tuple[str, float]:
        """Test the model with this name on the server; give it all requests, or roll back.

        Returns:
            URL of the service, and the median seconds of an answer.

        Raises:
            JobError: it failed.
            RunCancelledError: the run was terminated.
        """
        try:
            seconds = self._try(model, self.settings.canary_percent if self.begun else ALL)
            if self.begun:
                self.watched.leave_if_cancelled()
                self.service.settle(self.predictor, self.former)
            return address(self._wait(ALL)), seconds
        except KfpDdpError as error:
            if not self.begun:
                raise
            result = self._back()
            kind = RunCancelledError if isinstance(error, RunCancelledError) else JobError
            failure = kind(f"{error}; {result}")
            cancelled = kind is RunCancelledError
        if not cancelled:
            self._unpin()
        raise failure

    def _try(self, model: str, percent: int) -> float:
        url = address(self._wait(percent), newest=True)
        print(f"testing {url}", flush=True)
        times, seconds = self.settings.canary_requests, self.settings.canary_seconds
        check = self.watched.leave_if_cancelled
        return try_out(url, model, self.sample, times, seconds, check)

    def _wait(self, percent: int) -> Object:
        return self.watched.until_ready(self.spec, percent, self.settings.service_minutes * 60)

    def _back(self) -> str:
        try:
            return self.service.take_back(self.spec)
        except KfpDdpError as error:
            return str(error)

    def _unpin(self) -> None:
        """Remove the share of the restored predictor when it is ready; it has all requests."""
        if self.former is None:
            return
        spec = label(self.former, SPEC)
        try:
            self.watched.until_ready(spec, 0, self.settings.service_minutes * 60)
            self.service.settle(self.former, None)
        except KfpDdpError as error:
            version = label(self.former, VERSION)
            print(f"warning: {self.service.name} remains pinned to {version}: {error}", flush=True)
