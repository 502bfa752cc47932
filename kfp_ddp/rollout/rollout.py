"""An InferenceService, its predictors, and the rollout of a new one: start, promote, roll back.

In KServe's Standard mode the new predictor is first tried beside the stable one, as a canary
without requests. Then, or at once with Knative, it takes the place of the other: until the rollout
ends it has a mark, and an annotation of the service has the previous predictor. The service alone
so tells a later step how far a rollout came, after a crash or a cancel.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from kfp_ddp.core.errors import InputError, JobError, Problem
from kfp_ddp.core.files import sha256_of_json
from kfp_ddp.core.log import log
from kfp_ddp.core.text import from_json
from kfp_ddp.k8s.api import IN_BACKGROUND, Api, ApiError, Object, serves
from kfp_ddp.k8s.objects import annotation, part, select
from kfp_ddp.k8s.resource import Resource
from kfp_ddp.models.inference_service import API_VERSION, DRAIN_SECONDS, KIND

SERVICES = Resource(API_VERSION, "inferenceservices")
OURS = {"app.kubernetes.io/managed-by": "kfp-ddp"}
_TIMES = 10
_PAUSE = 0.3
POD_OF = "serving.kserve.io/inferenceservice"
"""The label that KServe gives the pods of a service."""
TAGGED = "serving.kserve.io/enable-tag-routing"
"""Annotation of services that earlier versions made."""
SPEC = "kfp-ddp/spec"
"""Label of a predictor and its pods: a digest of its spec."""
VERSION = "kfp-ddp/version"
"""Label of a predictor and its pods: the version of the bundle."""
RUN = "kfp-ddp/run-id"
"""Annotation of a predictor: the run that deployed it."""
BUNDLE = "kfp-ddp/bundle"
"""Annotation of a predictor: the URI of its bundle."""
PREVIOUS = "kfp-ddp/before"
"""Annotation of a service: the predictor that a rollback restores."""
MARK = "canaryTrafficPercent"
"""Field of the predictor of an unfinished rollout; pods do not restart when it is removed.

Its value is 100: with Knative the new revision then gets all requests, as without the field.
"""
CANARY = "trial"
"""Name of the predictor that is tried beside the stable one, in that of its Deployment."""
AUTOSCALER = "serving.kserve.io/autoscalerClass"
MODE = "serving.kserve.io/deploymentMode"


def labelled(predictor: Object, version: str, uri: str, run_id: str) -> Object:
    """Return a predictor of a manifest with labels and annotations that identify its pods."""
    labels = {SPEC: sha256_of_json([predictor, version])[:16], VERSION: version}
    annotations = {RUN: run_id, BUNDLE: uri}
    if "maxReplicas" not in predictor:
        # Without it KServe makes a HorizontalPodAutoscaler, which needs a metrics server.
        annotations[AUTOSCALER] = "none"
    return {**predictor, "labels": labels, "annotations": annotations}


def is_standard_mode(service: Object) -> bool:
    """Return whether KServe runs a service without Knative; its webhook sets the annotation."""
    return annotation(service, MODE) in ("Standard", "RawDeployment")


def label(predictor: Object, name: str) -> str:
    """Return a label of a predictor; '' for none."""
    return str(part(predictor, "labels").get(name, ""))


def deployed_by(predictor: Object) -> str:
    """Return the run that deployed a predictor; '' if unknown."""
    return str(part(predictor, "annotations").get(RUN, ""))


def stable_of(service: Object) -> Object:
    """Return the predictor of a service that answers requests."""
    predictor: Object = service["spec"]["predictor"]
    if canary_of(service):
        predictor = {**predictor, "minReplicas": predictor["minReplicas"] - 1}
    return predictor


def canary_of(service: Object) -> Object:
    """Return the predictor that is tried beside the stable one; {} for none."""
    canaries: list[Object] = service["spec"].get("canary") or [{}]
    canary = part(canaries[0], "predictor")
    return canary if canary.get("name") == CANARY else {}


def has_canary(service: Object, spec: str) -> bool:
    """Return whether the predictor with this label is tried beside the stable one."""
    canary = canary_of(service)
    return bool(canary) and label(canary, SPEC) == spec


def canary_predictor(desired: Object) -> Object:
    """Return a predictor as a canary beside the stable one: with one pod."""
    predictor = {name: value for name, value in desired.items() if name != "maxReplicas"}
    labels = {**desired["labels"], SPEC: f"{label(desired, SPEC)}-{CANARY}"}
    # KServe would not delete the autoscaler of a canary.
    annotations = {**desired["annotations"], AUTOSCALER: "none"}
    more = {"name": CANARY, "minReplicas": 1, "labels": labels, "annotations": annotations}
    return {**predictor, **more}


def supports_canary(service: Object, stable: Object, desired: Object) -> bool:
    """Return whether KServe can run a predictor as a canary beside the stable one."""

    def fields(predictor: Object) -> set[str]:
        model = {f"model.{name}": value for name, value in part(predictor, "model").items()}
        return {name for name, value in {**predictor, **model}.items() if value}

    if service["spec"].get("canary") and not canary_of(service):
        return False
    # KServe completes a canary with the fields of the stable predictor.
    more = fields(stable) - fields(desired) - {MARK, "maxReplicas", "minReplicas"}
    return is_standard_mode(service) and not more


def is_unfinished(service: Object) -> bool:
    """Return whether a rollout is unfinished."""
    return bool(stable_of(service).get(MARK))


def previous_of(service: Object) -> Object | None:
    """Return the predictor before an unfinished rollout; None if there was no service."""
    text = annotation(service, PREVIOUS)
    try:
        predictor: Object | None = from_json(text) if text else None
    except ValueError as error:
        name = service["metadata"]["name"]
        raise InputError(
            f"the annotation {PREVIOUS} of InferenceService {name} is invalid ({error}): delete it"
        ) from None
    return predictor


def spec_labels(service: Object) -> set[str]:
    """Return the labels SPEC of the predictors of a service."""
    return {label(stable_of(service), SPEC), label(canary_of(service), SPEC)}


def mark(predictor: Object) -> Object:
    """Return a predictor with the mark of an unfinished rollout."""
    return {**predictor, MARK: 100}


def unmark(predictor: Object) -> Object:
    """Return a predictor without that mark."""
    return {name: value for name, value in predictor.items() if name != MARK}


def annotations_to_keep(service: Object) -> dict[str, str]:
    """Return the annotations of a service whose pods may not restart."""
    return select(part(service, "metadata", "annotations"), (TAGGED, PREVIOUS))


Change = tuple[Object, dict[str, str]]
"""Spec and annotations of a service."""


def updated_service(predictor: Object, previous: Object | None) -> Change:
    """Return a service with this predictor, and the one that a rollback restores."""
    annotations: dict[str, str] = {}  # pods restart if one changes
    if previous is not None:
        text = json.dumps(unmark(previous), sort_keys=True, separators=(",", ":"))
        annotations[PREVIOUS] = text
    return {"predictor": predictor}, annotations


def service_with_canary(existing: Object, stable: Object, desired: Object) -> Change:
    """Return a service that tries a predictor beside the stable one, without requests."""
    # KServe takes the pods of canaries off the stable predictor's.
    pods = int(stable.get("minReplicas") or 1) + 1
    canary = {"trafficPercent": 0, "predictor": canary_predictor(desired)}
    spec = {"predictor": {**unmark(stable), "minReplicas": pods}, "canary": [canary]}
    return spec, annotations_to_keep(existing)


def first_change(existing: Object | None, desired: Object, may_try: bool = True) -> Change | None:
    """Return the change that starts the rollout of a predictor; None if the service has it.

    Without `may_try` it takes the place of the stable one at once.
    """
    if existing is None:
        return updated_service(mark(desired), None)
    spec = label(desired, SPEC)
    current = stable_of(existing)
    stable: Object | None = current
    if is_unfinished(existing):
        stable = previous_of(existing)
    elif label(current, SPEC) == spec:
        return None
    if stable and may_try:
        is_new = spec not in (label(current, SPEC), label(stable, SPEC))
        if is_new and supports_canary(existing, stable, desired):
            return service_with_canary(existing, stable, desired)
    return updated_service(mark(desired), stable)


class Service:
    """A managed InferenceService; raises InputError, and JobError if another run changed it."""

    def __init__(self, api: Api, name: str) -> None:
        self.api = api
        self.name = name

    def find(self) -> Object | None:
        """Return the service, or None; raise InputError without KServe, or if it is not managed."""
        try:
            service = self.api.get(SERVICES, self.name, retry=True)
        except ApiError as error:
            raise _refused(error) from error
        if service is None:
            check_kserve(self.api)
            return None
        if not part(service, "metadata", "labels").items() >= OURS.items():
            what = (
                f"InferenceService {self.name} in {self.api.namespace} was not made by kfp-ddp and "
                "is not changed"
            )
            remedy = (
                "name another service, or hand it over with kubectl label "
                f"inferenceservice {self.name} app.kubernetes.io/managed-by=kfp-ddp"
            )
            raise InputError(Problem(what, remedy))
        return service

    def with_pre_stop(self, desired: Object) -> Object:
        """Return the predictor with a wait of its pods before they stop, so no request is lost."""
        try:
            # A dry run tells the mode of a service that is not there.
            existing = self.find() or self._put({"predictor": desired}, {}, None, dryRun="All")
        except ApiError as error:
            raise _refused(error) from error
        # Our server waits itself; Knative does the same, and refuses this.
        if "model" not in desired or not is_standard_mode(existing):
            return desired
        wait = {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}}
        return {**desired, "model": {**desired["model"], "lifecycle": wait}}

    def begin(self, desired: Object) -> Object:
        """Start the rollout of a predictor, unless the service has it; return the service."""
        try:
            return self._update(lambda existing: first_change(existing, desired))
        except InputError as error:
            if "canary" not in str(error):  # as of KServe before 0.20
                raise
            log.info(f"{self.name} is replaced without a canary: {error}")
            return self._update(lambda existing: first_change(existing, desired, may_try=False))

    def promote(self, desired: Object) -> Object:
        """Put a predictor that was tried beside the stable one in its place."""
        return self._advance(
            label(canary_predictor(desired), SPEC),
            lambda service: label(stable_of(service), SPEC) == label(desired, SPEC),
            lambda service: updated_service(mark(desired), stable_of(service)),
        )

    def finish(self, predictor: Object, previous: Object | None) -> Object:
        """End the rollout of a predictor."""
        return self._replace(label(predictor, SPEC), unmark(predictor), previous)

    def roll_back(self, spec: str) -> str:
        """Take the predictor with this label out of the service; return the result as text."""
        existing = self.find()
        if existing is None:
            return "there is no service any more"
        if has_canary(existing, spec):
            service = self._advance(
                spec,
                lambda service: not canary_of(service),
                lambda service: ({"predictor": stable_of(service)}, annotations_to_keep(service)),
            )
            restored = stable_of(service)
        else:
            previous = previous_of(existing)
            if previous is None:
                return self._delete(existing, spec)
            self._replace(spec, previous, None)
            restored = previous
        version = label(restored, VERSION) or "the previous model"
        return f"{self.name} answers with {version} as before"

    def _delete(self, existing: Object, spec: str) -> str:
        """Delete the service, which has only the predictor with this label; return the result."""
        if label(stable_of(existing), SPEC) != spec:
            raise self.taken_over(existing)
        seen = {"preconditions": {"uid": existing["metadata"]["uid"]}}
        try:
            self.api.delete(SERVICES, self.name, {**IN_BACKGROUND, **seen})
        except ApiError as error:
            if error.status != 409:
                raise _refused(error) from error
        return f"InferenceService {self.name} was deleted, as nothing answered before"

    def _replace(self, spec: str, predictor: Object, previous: Object | None) -> Object:
        """Put a predictor without the mark in the place of the one with this label."""

        def done(service: Object) -> bool:
            current = stable_of(service)
            return label(current, SPEC) == label(predictor, SPEC) and MARK not in current

        return self._advance(spec, done, lambda _: updated_service(predictor, previous))

    def _advance(
        self, spec: str, done: Callable[[Object], bool], change: Callable[[Object], Change]
    ) -> Object:
        """Change the service, which has the predictor with this label, unless that is done."""

        def checked(existing: Object | None) -> Change | None:
            if existing and done(existing):
                return None
            if existing is None or spec not in spec_labels(existing):
                raise self.taken_over(existing)
            return change(existing)

        return self._update(checked)

    def _update(self, change: Callable[[Object | None], Change | None]) -> Object:
        """Write what `change` returns for the service; it is called again after another change."""
        for _ in range(_TIMES):
            existing = self.find()
            changed = change(existing)
            if changed is None:
                return existing or {}
            try:
                return self._put(*changed, existing)
            except ApiError as error:
                if error.status != 409:
                    raise _refused(error) from error
                time.sleep(_PAUSE)  # changed since it was read
        raise JobError(f"InferenceService {self.name} kept changing during its update; try later")

    def taken_over(self, service: Object | None) -> JobError:
        """Return the error of a rollout whose predictor was replaced."""
        if service is None:
            return JobError(f"InferenceService {self.name} was deleted while it was rolled out")
        run = deployed_by(canary_of(service) or stable_of(service)) or "another writer"
        return JobError(f"InferenceService {self.name} was given another model by {run} meanwhile")

    def _put(
        self, spec: Object, annotations: Object, existing: Object | None, **query: str
    ) -> Object:
        metadata: dict[str, Any] = {"name": self.name, "labels": OURS, "annotations": annotations}
        if existing is not None:
            metadata["resourceVersion"] = existing["metadata"]["resourceVersion"]
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
        return self.api.retry(lambda: self.api.apply(SERVICES, body, **query))


def _refused(error: ApiError) -> InputError | JobError:
    return JobError(str(error)) if error.transient else InputError(str(error))


def check_kserve(api: Api) -> None:
    """Raise InputError for a cluster without KServe."""
    if not serves(api, SERVICES):
        what = f"this cluster has no {SERVICES.plural} ({API_VERSION})"
        raise InputError(Problem(what, "install KServe, or leave service of release empty"))


def versions_in_service(api: Api) -> set[str]:
    """Return the versions of bundles that managed services have, or would roll back to."""
    versions = set()
    for service in _managed(api, {404}):
        for predictor in (stable_of(service), previous_of(service) or {}, canary_of(service)):
            versions.add(label(predictor, VERSION))
    return versions - {""}


def roll_back_run(api: Api, run_id: str) -> list[str]:
    """Roll back what a run has not finished, as after a cancel; return a line for each."""
    lines = []
    for service in _managed(api, {403, 404}):
        new = canary_of(service)
        if is_unfinished(service):
            new = stable_of(service)
        if deployed_by(new) == run_id:
            lines.append(Service(api, service["metadata"]["name"]).roll_back(label(new, SPEC)))
    return lines


def _managed(api: Api, none: set[int]) -> list[Object]:
    """Return the managed services, with one of these HTTP statuses none; or raise JobError."""
    selector = ",".join(f"{name}={value}" for name, value in OURS.items())
    try:
        return api.list_objects(SERVICES, {"labelSelector": selector}, retry=True)
    except ApiError as error:
        if error.status in none:
            return []
        raise JobError(str(error)) from error
