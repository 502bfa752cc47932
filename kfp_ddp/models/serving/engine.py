"""The deploy step: a published bundle rolled out on an InferenceService, or taken back."""

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
from kfp_ddp.storage.destination import open_destination

if TYPE_CHECKING:
    from kfp import dsl

ALL = 100


class Deployed(NamedTuple):
    """Where the service answers inside the cluster, '' for none; the version that answers there."""

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
    """Roll the bundle out, and tell in the artifact what came of it."""
    settings = part_of(release, Deployment)
    found, said = Deployed("", ""), "no service is named in release: nothing was rolled out"
    if settings.service and not bundle:
        said = "nothing was uploaded, so there is nothing to roll out"
    elif settings.service and (other := _other_champion(bundle)):
        said = f"{bundle} is not rolled out: {other} is the champion now"
    elif settings.service:
        api = Api.connect()
        found, said = roll_out(api, settings, bundle, model_name, run_id)
    print(said, flush=True)
    Path(deploy_report.path).write_text(f"{cell(said)}\n", encoding="utf-8")
    deploy_report.metadata.update({"service": settings.service, **found._asdict()})
    return found


def roll_out(
    api: Api, settings: Deployment, uri: str, model_name: str, run_id: str
) -> tuple[Deployed, str]:
    """Put the bundle to work: on trial, asked for its sample, and then for all requests.

    Args:
        api: The cluster, in the namespace of the service.
        settings: Which service, and how.
        uri: Of the bundle.
        model_name: Of the model in it.
        run_id: Of the run that does it.

    Returns:
        Where it answers, and what was done in words.

    Raises:
        InputError: what cannot be used, before anything is changed.
        JobError: it did not get ready or answers wrongly; what was before answers again.
        RunCancelledError: the run was terminated; what was before answers again.
    """
    sealed = _bundle(uri)
    sample = Sample.of(sealed)
    wanted = signed(_predictor(settings, uri, model_name), sealed.version, uri, run_id)
    service = Service(api, settings.service)
    there = service.begin(wanted, settings.canary_percent)
    rollout = Rollout(api, service, there, settings, sample)
    model = served_name(settings.service, model_name, settings.service_runtime)
    with rollout.watched.watching():
        url, seconds = rollout.run(model)
    how = "answers" if rollout.begun else "already answered, and still does"
    said = (
        f"InferenceService {settings.service} {how} with {model_name} {sealed.version} at {url}: "
        f"the bundle's sample {settings.canary_requests} times rightly, {seconds * 1e3:.0f} ms each"
    )
    return Deployed(url, sealed.version), said


def _other_champion(uri: str) -> str:
    """The version that is the champion in the place of this bundle; '' for none."""
    models, _, version = uri.rstrip("/").rpartition("/")
    named = read_pointer(open_destination(models))
    return named if named != version else ""


def _bundle(uri: str) -> Bundle:
    advice = "publish it again"
    found = Bundle.at(open_destination(uri), "", "the bundle", advice)
    if found.listed is None:
        raise InputError(f"there is no bundle at {uri}: give what publish returned")
    return found


def _predictor(settings: Deployment, uri: str, model_name: str) -> Object:
    amounts = {"cpu": settings.service_cpu, "memory": settings.service_memory}
    made = manifest(
        settings.service,
        uri,
        model_name,
        settings.service_runtime,
        image=settings.service_image,
        resources={"requests": amounts, "limits": amounts},
        service_account=settings.service_account,
    )
    return {**predictor_of(made), "minReplicas": settings.service_replicas}


class Rollout:
    """What was begun, to its good end or back."""

    def __init__(
        self, api: Api, service: Service, there: Object, settings: Deployment, sample: Sample
    ) -> None:
        self.service, self.settings, self.sample = service, settings, sample
        self.predictor, self.former = predictor_of(there), before(there)
        self.spec, self.begun = label(self.predictor, SPEC), on_trial(there)
        self.watched = Watched(api, service)

    def run(self, model: str) -> tuple[str, float]:
        """Try the predictor out and let it have all requests, or take it back.

        Args:
            model: What the server calls the model.

        Returns:
            Where the service answers, and the median seconds of an answer.

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
            done = self._back()
            kind = RunCancelledError if isinstance(error, RunCancelledError) else JobError
            told = kind(f"{error}; {done}")
            cancelled = kind is RunCancelledError
        if not cancelled:
            self._unpin()
        raise told

    def _try(self, model: str, percent: int) -> float:
        url = address(self._wait(percent), newest=True)
        print(f"asking {url}", flush=True)
        asked = (url, model, self.sample)
        times, seconds = self.settings.canary_requests, self.settings.canary_seconds
        return try_out(*asked, times, seconds, self.watched.leave_if_cancelled)

    def _wait(self, percent: int) -> Object:
        return self.watched.until_ready(self.spec, percent, self.settings.service_minutes * 60)

    def _back(self) -> str:
        try:
            return self.service.take_back(self.spec)
        except KfpDdpError as error:
            return str(error)

    def _unpin(self) -> None:
        """Let what was put back be as it was, once it is ready: its requests go there already."""
        if self.former is None:
            return
        spec = label(self.former, SPEC)
        try:
            self.watched.until_ready(spec, 0, self.settings.service_minutes * 60)
            self.service.settle(self.former, None)
        except KfpDdpError as error:
            version = label(self.former, VERSION)
            print(f"warning: {self.service.name} stays pinned to {version}: {error}", flush=True)
