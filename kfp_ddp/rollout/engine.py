"""The deploy step: roll out a published bundle on an InferenceService, or roll it back."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.log import log
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import cell, from_json, one_line
from kfp_ddp.k8s.api import Api, Object
from kfp_ddp.k8s.objects import part
from kfp_ddp.models.bundle import REQUEST, RESPONSE, Bundle
from kfp_ddp.models.champion import open_bundle, read_pointer
from kfp_ddp.models.inference_service import manifest, served_name
from kfp_ddp.models.interface import Sample, read_sample
from kfp_ddp.models.release import Deployment, part_of
from kfp_ddp.rollout.rollout import (
    CANARY,
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
from kfp_ddp.rollout.wait import ServiceWatch, predictor_status
from kfp_ddp.storage.kinds import open_store


@step
def run(
    *,
    bundle: str,
    model_name: str,
    release: Mapping[str, Any],
    run_id: str,
    deploy_report: Artifact,
) -> tuple[str, str]:
    """Roll out the bundle; return the service's URL in the cluster, and its version, or ''."""
    settings = part_of(release, Deployment)
    url = ""
    version = ""
    result = _why_nothing_to_do(settings.service, bundle)
    if not result:
        url, version, result = roll_out(Api.connect(), settings, bundle, model_name, run_id)
    log.info(result)
    facts = {"service": settings.service, "url": url, "version": version}
    write_artifact(deploy_report, f"{cell(result)}\n", **facts)
    return url, version


def _why_nothing_to_do(service: str, bundle: str) -> str:
    """Return why no service is changed; '' if one is."""
    if not service:
        return "no service is named in release: nothing was rolled out"
    if not bundle:
        return "nothing was uploaded, so there is nothing to roll out"
    if other := _other_champion(bundle):
        return f"{bundle} is not rolled out: {other} is the champion now"
    return ""


def roll_out(
    api: Api, settings: Deployment, uri: str, model_name: str, run_id: str
) -> tuple[str, str, str]:
    """Deploy and test the bundle, then give it all requests; return URL, version and result.

    InputError: nothing was changed. JobError, RunCancelledError: the previous model was restored.
    """
    bundle = open_bundle(uri, "publish it again")
    sample = sample_of(bundle)
    predictor = _predictor(settings, bundle.uri, model_name)
    desired = labelled(predictor, bundle.version, bundle.uri, run_id)
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
    predictor = {**stable_of(service), "minReplicas": settings.service_replicas}
    if settings.service_max_replicas:
        predictor["maxReplicas"] = settings.service_max_replicas
    return predictor


class Rollout:
    """A rollout from its start, until it succeeds or is rolled back."""

    def __init__(self, api: Api, settings: Deployment, desired: Object, sample: Sample) -> None:
        self.settings = settings
        self.sample = sample
        self.service = Service(api, settings.service)
        self.desired = self.service.with_pre_stop(desired)
        self._continue(self.service.begin(self.desired))
        self.watched = ServiceWatch(api, self.service)

    def _continue(self, service: Object) -> None:
        """Take the state of the rollout from the service."""
        self.predictor = stable_of(service)
        self.previous = previous_of(service)
        self.spec = label(canary_predictor(self.desired), SPEC)
        self.has_canary = has_canary(service, self.spec)
        if not self.has_canary:
            self.spec = label(self.predictor, SPEC)
        self.is_unfinished = self.has_canary or is_unfinished(service)

    def run(self, model: str) -> tuple[str, float]:
        """Test the model, then promote it or roll back; return the URL and the median seconds."""
        try:
            if self.has_canary:
                self._try(model)
                self.watched.leave_if_cancelled()
                self._continue(self.service.promote(self.desired))
            seconds = self._try(model)
            if self.is_unfinished:
                self.watched.leave_if_cancelled()
                self.service.finish(self.predictor, self.previous)
            return address(self._wait(self.spec)), seconds
        except KfpDdpError as error:
            if not self.is_unfinished:
                raise
            try:
                result = self.service.roll_back(self.spec)
            except KfpDdpError as failed:
                result = str(failed)
            text = f"{error}; {result}"
            if isinstance(error, RunCancelledError):
                raise RunCancelledError(text) from None
        self._wait_for_previous()
        raise JobError(text)

    def _try(self, model: str) -> float:
        url = address(self._wait(self.spec), self.spec)
        log.info(f"testing {url}")
        return check_canary(
            url,
            model,
            self.sample,
            self.settings.canary_requests,
            self.settings.canary_seconds,
            self.watched.leave_if_cancelled,
        )

    def _wait(self, spec: str) -> Object:
        return self.watched.until_ready(spec, self.settings.service_minutes * 60)

    def _wait_for_previous(self) -> None:
        """Wait until the predictor that a rollback restored is ready again."""
        if self.previous is None or self.has_canary:
            return
        try:
            self._wait(label(self.previous, SPEC))
        except KfpDdpError as error:
            version = label(self.previous, VERSION)
            log.warning(f"{version} is restored, but not ready: {error}")


# Of the largest logit: half precision, the default of some runtimes, differs by 0.2 %.
TOLERANCE = 0.01
SILENT_SECONDS = 60.0
"""Seconds without an answer."""
WRONG_SECONDS = 20.0
"""Seconds with a wrong answer, such as the previous model's: routes change with a delay."""
_PAUSE = 0.5
_LARGEST_ANSWER = 16 << 20
_PART = 1 << 20


def sample_of(bundle: Bundle) -> Sample:
    """Return the sample of a bundle; raise InputError if the bundle has none, or is damaged."""
    sample = read_sample(bundle)
    if sample is None:
        raise InputError(
            f"the bundle {bundle.uri} has no {REQUEST} to try a service with: export it again"
        )
    if not all(map(math.isfinite, (*sample.logits, sample.allowed))):
        raise bundle.damaged(f"{RESPONSE} has a number that is not finite")
    largest = max(map(abs, sample.logits), default=0.0)
    return sample._replace(allowed=max(sample.allowed, TOLERANCE * largest))


def difference(sample: Sample, answer: bytes) -> str:
    """Return what is wrong with an answer, as text; '' if it is correct."""
    try:
        outputs = {part["name"]: part["data"] for part in from_json(answer)["outputs"]}
        logits = [float(value) for value in outputs[sample.output]]
    except (ValueError, KeyError, TypeError, OverflowError):
        text = one_line(answer[:200].decode("utf-8", "replace"))
        return f"it is not a v2 answer with {sample.output}: {text}"
    if len(logits) != len(sample.logits):
        return f"it has {len(logits)} logits, the bundle {len(sample.logits)}"
    differences = [abs(a - b) for a, b in zip(logits, sample.logits, strict=True)]
    if not all(value <= sample.allowed for value in differences):  # also true for NaN
        worst = next((value for value in differences if math.isnan(value)), max(differences))
        return (
            f"its logits differ from the bundle's by {worst:.3g}, {sample.allowed:.3g} is allowed"
        )
    return ""


def address(service: Object, spec: str = "") -> str:
    """Return the URL of a service in the cluster, or of one predictor; JobError for none."""
    name = service["metadata"]["name"]
    own = part(predictor_status(service), "address").get("url")
    shared = part(service, "status", "address").get("url") or part(service, "status").get("url")
    url = str(own or shared or "")
    if not url:
        raise JobError(f"KServe reports no address of InferenceService {name}")
    if has_canary(service, spec):
        return url.replace(f"//{name}-predictor.", f"//{name}-{CANARY}-predictor.")
    return url


def ask(url: str, model: str, sample: Sample, seconds: float) -> tuple[str, float]:
    """Send the sample once; return the error or '', and for how many seconds to retry."""
    path = f"{url.rstrip('/')}/v2/models/{model}/infer"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(path, sample.request, headers)  # noqa: S310
    try:
        # Without a proxy: the address is inside the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=seconds) as answer:
            content = _read_all(answer, time.monotonic() + seconds)
    except urllib.error.HTTPError as error:
        with error:
            text = one_line(error.read(400).decode("utf-8", "replace"))
        return f"{path} answers {error.code}: {text}", SILENT_SECONDS
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        why = f"does not answer: {reason}"
        if isinstance(reason, TimeoutError):
            why = f"did not answer within {seconds:g} s"
        return f"{path} {one_line(why)}", SILENT_SECONDS
    wrong = difference(sample, content)
    if wrong:
        wrong = f"{path} returns a wrong result: {wrong}"
    return wrong, WRONG_SECONDS


def _read_all(answer: HTTPResponse, until: float) -> bytes:
    """Return the body; the timeout of the connection is that of each part only."""
    content = b""
    while len(content) < _LARGEST_ANSWER and (part := answer.read1(_PART)):
        content += part
        if time.monotonic() > until:
            raise TimeoutError
    return content


def check_canary(
    url: str,
    model: str,
    sample: Sample,
    times: int,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Send the sample until `times` answers in a row are correct; return the median seconds.

    `check` is called before each. Raise JobError after a wrong or no answer for too long.
    """
    taken: list[float] = []
    wrong_since = 0.0
    latest = time.monotonic() + times * seconds
    while len(taken) < times:
        check()
        start = time.monotonic()
        wrong, may_last = ask(url, model, sample, seconds)
        if not wrong:
            taken.append(time.monotonic() - start)
            wrong_since = 0.0
            continue
        wrong_since = wrong_since or start
        if time.monotonic() > min(wrong_since, latest) + may_last:
            raise JobError(wrong)
        taken.clear()
        time.sleep(_PAUSE)
    return sorted(taken)[len(taken) // 2]
