"""Rollout of a new version of an InferenceService: start, promote, roll back.

During a trial the predictor has a share of the requests above 0, `canaryTrafficPercent`, and an
annotation of the service has the previous predictor. A later step can so recognize an unfinished
rollout, after a crash or a cancel, and end it. KServe splits requests only with Knative.
"""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import DELETE, Api, ApiError, Object, custom
from kfp_ddp.models.serving.inference_service import API_VERSION, KIND

PLURAL = "inferenceservices"
POD_OF = "serving.kserve.io/inferenceservice"
"""The label that KServe gives the pods of a service."""
TAGGED = "serving.kserve.io/enable-tag-routing"
"""The annotation that makes Knative give the newest revision its own address."""
OURS = {"app.kubernetes.io/managed-by": "kfp-ddp"}
SPEC, VERSION = "kfp-ddp/spec", "kfp-ddp/version"
"""Labels of a predictor and its pods: a digest of its spec, and the bundle's version."""
RUN, BUNDLE = "kfp-ddp/run-id", "kfp-ddp/bundle"
"""Annotations of a predictor: the run that deployed it, and the URI of its bundle."""
BEFORE = "kfp-ddp/before"
"""Annotation of a service: the predictor that a rollback restores."""
PERCENT = "canaryTrafficPercent"
_TIMES, _PAUSE = 10, 0.3


def signed(predictor: Object, version: str, uri: str, run_id: str) -> Object:
    """Return a predictor of a manifest with labels and annotations that identify its pods."""
    content = json.dumps([predictor, version], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    labels = {SPEC: digest, VERSION: version}
    return {**predictor, "labels": labels, "annotations": {RUN: run_id, BUNDLE: uri}}


def label(predictor: Object, name: str) -> str:
    """Return a label of a predictor; '' for none."""
    return str((predictor.get("labels") or {}).get(name, ""))


def deployed_by(predictor: Object) -> str:
    """Return the run that deployed a predictor; '' if unknown."""
    return str((predictor.get("annotations") or {}).get(RUN, ""))


def predictor_of(service: Object) -> Object:
    """Return the predictor of a service."""
    predictor: Object = service["spec"]["predictor"]
    return predictor


def _same(one: Object, other: Object) -> bool:
    return label(one, SPEC) == label(other, SPEC) and one.get(PERCENT) == other.get(PERCENT)


def on_trial(service: Object) -> bool:
    """Return whether a rollout is unfinished."""
    return int(predictor_of(service).get(PERCENT) or 0) > 0


def before(service: Object) -> Object | None:
    """Return the predictor before the one on trial; None if there was no service."""
    text = (service["metadata"].get("annotations") or {}).get(BEFORE, "")
    predictor: Object | None = json.loads(text) if text else None
    return predictor


class Service:
    """An InferenceService of this namespace that this package manages."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.path = custom(API_VERSION, api.namespace, PLURAL, name)

    def find(self) -> Object | None:
        """Return the service, or None.

        Raises:
            InputError: KServe is not installed, access is denied, or the service is not managed.
        """
        try:
            service = self.api.call("GET", self.path, retry=True)
        except ApiError as error:
            if error.status != 404:
                raise self._refused("get", error) from error
            served(self.api)
            return None
        labels = service["metadata"].get("labels") or {}
        if not labels.items() >= OURS.items():
            raise InputError(
                f"InferenceService {self.name} in {self.api.namespace} was not made by kfp-ddp and "
                "is left alone; name another service, or hand it over with kubectl label "
                f"inferenceservice {self.name} app.kubernetes.io/managed-by=kfp-ddp"
            )
        return service

    def begin(self, desired: Object, percent: int) -> Object:
        """Start the trial of a predictor, unless the service has it already; return the service.

        It also replaces an unfinished rollout; the predictor before that remains recorded.

        Args:
            desired: The predictor, from `signed`.
            percent: Its share of the requests.

        Raises:
            InputError: access is denied, or the server refuses it.
        """

        def change(existing: Object | None) -> tuple[Object, Object | None] | None:
            trial = {**desired, PERCENT: percent}
            if existing is None:
                return trial, None
            if on_trial(existing):
                return trial, before(existing)
            current = predictor_of(existing)
            return None if label(current, SPEC) == label(desired, SPEC) else (trial, current)

        return self._update(change)

    def settle(self, predictor: Object, former: Object | None) -> Object:
        """Give a predictor all requests.

        Raises:
            InputError: access is denied.
            JobError: another run has deployed another predictor.
        """
        final = {name: value for name, value in predictor.items() if name != PERCENT}
        return self._end(label(predictor, SPEC), final, former)

    def take_back(self, spec: str) -> str:
        """Give all requests to the previous predictor; return the result as text.

        `spec` is the label of the failed predictor; another one is not changed.

        Raises:
            InputError: access is denied.
            JobError: another run has deployed another predictor.
        """
        existing = self.find()
        if existing is None:
            return "there is no service any more"
        if (former := before(existing)) is None:
            self._delete(existing, spec)
            return f"InferenceService {self.name} was deleted, as nothing answered before"
        self._end(spec, {**former, PERCENT: 0}, None)
        version = label(former, VERSION)
        return f"{self.name} answers with {version or 'the previous model'} as before"

    def _end(self, spec: str, predictor: Object, former: Object | None) -> Object:
        """Replace the predictor with this label."""

        def change(existing: Object | None) -> tuple[Object, Object | None] | None:
            current = predictor_of(existing) if existing else {}
            if existing and _same(current, predictor):
                return None
            if existing is None or label(current, SPEC) != spec:
                raise self.taken_over(existing)
            return predictor, former

        return self._update(change)

    def _update(
        self, change: Callable[[Object | None], tuple[Object, Object | None] | None]
    ) -> Object:
        """Write the predictor and the one before it that `change` returns for the service.

        `change` returns None to leave the service, and is called again after another change.
        """
        for _ in range(_TIMES):
            existing = self.find()
            changed = change(existing)
            if changed is None:
                return existing or {}
            try:
                return self._put(*changed, existing)
            except ApiError as error:
                if error.status != 409:
                    raise self._refused("patch", error) from error
                time.sleep(_PAUSE)  # changed since it was read
        raise JobError(f"InferenceService {self.name} is changed by others all the time; try later")

    def taken_over(self, service: Object | None) -> JobError:
        """Return the error of a rollout whose predictor was replaced."""
        if service is None:
            return JobError(f"InferenceService {self.name} was deleted while it was rolled out")
        run = deployed_by(predictor_of(service)) or "another writer"
        return JobError(f"InferenceService {self.name} was given another model by {run} meanwhile")

    def _put(self, predictor: Object, former: Object | None, existing: Object | None) -> Object:
        annotations = {TAGGED: "true"}
        if former is not None:
            previous = {name: value for name, value in former.items() if name != PERCENT}
            annotations[BEFORE] = json.dumps(previous, sort_keys=True, separators=(",", ":"))
        metadata: dict[str, Any] = {"name": self.name, "labels": OURS, "annotations": annotations}
        if existing is not None:
            metadata["resourceVersion"] = existing["metadata"]["resourceVersion"]
        kind = {"apiVersion": API_VERSION, "kind": KIND}
        body = {**kind, "metadata": metadata, "spec": {"predictor": predictor}}
        return self.api.retry(lambda: self.api.apply(self.path, body))

    def _delete(self, service: Object, spec: str) -> None:
        if label(predictor_of(service), SPEC) != spec:
            raise self.taken_over(service)
        seen = {"preconditions": {"uid": service["metadata"]["uid"]}}
        try:
            self.api.call("DELETE", self.path, {**DELETE, **seen}, retry=True)
        except ApiError as error:
            if error.status not in (404, 409):
                raise self._refused("delete", error) from error

    def _refused(self, verb: str, error: ApiError) -> InputError | JobError:
        if error.transient:
            return JobError(
                f"the cluster does not answer well: {one_line(error.message)}; try later"
            )
        if error.status == 403 and "cannot" in error.message:
            where = f"in namespace {self.api.namespace}"
            return InputError(f"no right to {verb} {PLURAL} {where}; apply deploy/rbac there")
        message = one_line(error.message)
        return InputError(f"the cluster refused InferenceService {self.name}: {message}")


def served(api: Api) -> None:
    """Refuse a cluster without InferenceServices.

    Raises:
        InputError: KServe is not installed.
    """
    try:
        resources = api.call("GET", f"/apis/{API_VERSION}", retry=True)["resources"]
    except ApiError as error:
        if error.status != 404:
            return  # without the right to look, its use reports the error
        resources = []
    if not any(resource["name"] == PLURAL for resource in resources):
        raise InputError(
            f"this cluster has no {PLURAL} ({API_VERSION}); install KServe, or leave service of "
            "release empty"
        )


def in_service(api: Api) -> set[str]:
    """Return the versions of bundles that managed services have, or would roll back to.

    Raises:
        JobError: services cannot be listed.
    """
    try:
        services = _managed(api)
    except ApiError as error:
        if error.status == 404:
            return set()
        raise JobError(f"cannot list {PLURAL}: {one_line(error.message)}") from error
    predictors = [
        predictor
        for service in services
        for predictor in (predictor_of(service), before(service))
        if predictor
    ]
    return {version for predictor in predictors if (version := label(predictor, VERSION))}


def take_back_of(api: Api, run_id: str) -> list[str]:
    """Roll back what a run has on trial, as after a cancel; return a line for each.

    Raises:
        JobError: a rollback failed.
    """
    try:
        services = _managed(api)
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise JobError(f"cannot list {PLURAL}: {one_line(error.message)}") from error
    return [
        Service(api, service["metadata"]["name"]).take_back(label(predictor_of(service), SPEC))
        for service in services
        if on_trial(service) and deployed_by(predictor_of(service)) == run_id
    ]


def _managed(api: Api) -> list[Object]:
    selector = ",".join(f"{name}={value}" for name, value in OURS.items())
    path, query = custom(API_VERSION, api.namespace, PLURAL), {"labelSelector": selector}
    services: list[Object] = api.call("GET", path, query=query, retry=True)["items"]
    return services
