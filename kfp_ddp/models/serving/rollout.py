"""Rollout of a new version of an InferenceService: start, promote, roll back."""

import time
from collections.abc import Callable
from typing import Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import DELETE, Api, ApiError, Object, custom
from kfp_ddp.models.serving.inference_service import API_VERSION, KIND
from kfp_ddp.models.serving.predictors import (
    PERCENT,
    SPEC,
    VERSION,
    Change,
    before,
    beside,
    can_be_beside,
    deployed_by,
    drained,
    final,
    in_standard_mode,
    is_beside,
    kept,
    label,
    on_trial,
    predictor_of,
    replaced,
    specs_of,
    trial_of,
)

PLURAL = "inferenceservices"
OURS = {"app.kubernetes.io/managed-by": "kfp-ddp"}
_TIMES, _PAUSE = 10, 0.3


class Service:
    """An InferenceService of this namespace that this package manages.

    Methods raise InputError if access is denied or the server refuses a change, and JobError if
    another run has deployed another predictor meanwhile.
    """

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.path = custom(API_VERSION, api.namespace, PLURAL, name)

    def find(self) -> Object | None:
        """Return the service, or None; raise InputError without KServe, or if it is not managed."""
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

    def drained(self, desired: Object) -> Object:
        """Return the predictor as it stops without losing requests in the cluster's mode."""
        try:
            # A dry run tells the mode of a service that is not there.
            existing = self.find() or self._put({"predictor": desired}, {}, None, dryRun="All")
        except ApiError as error:
            raise self._refused("patch", error) from error
        return drained(desired) if in_standard_mode(existing) else desired

    def begin(self, desired: Object, percent: int) -> Object:
        """Start the trial of a predictor, unless the service has it already; return the service.

        `desired` is of `signed`, and gets `percent` of the requests. It also replaces an unfinished
        rollout; the predictor before that remains recorded.
        """
        spec = label(desired, SPEC)

        def change(existing: Object | None, may_try: bool = True) -> Change | None:
            trial = {**desired, PERCENT: percent}
            if existing is None:
                return replaced(trial, None)
            current = predictor_of(existing)
            if on_trial(existing):
                answering = before(existing)
            elif label(current, SPEC) == spec:
                # A rollback that was killed has left it at 0 % of Knative's newest revision.
                pinned = PERCENT in current
                return ({"predictor": final(current)}, kept(existing)) if pinned else None
            else:
                answering = current
            known = (label(current, SPEC), label(answering or {}, SPEC))
            if not (may_try and answering and spec not in known):
                return replaced(trial, answering)
            if not can_be_beside(existing, answering, desired):
                return replaced(trial, answering)
            # KServe takes the pods of canaries off the answering predictor's.
            more = {"minReplicas": int(answering.get("minReplicas") or 1) + 1}
            canary = [{"trafficPercent": 0, "predictor": beside(desired)}]
            return {"predictor": final(answering) | more, "canary": canary}, kept(existing)

        try:
            return self._update(change)
        except InputError as error:
            if "canary" not in str(error):  # as of KServe before 0.20
                raise
            print(f"{self.name} is replaced without a trial beside it: {error}", flush=True)
            return self._update(lambda existing: change(existing, may_try=False))

    def promote(self, desired: Object, percent: int) -> Object:
        """Put a predictor that was tried beside the answering one in its place."""
        return self._advance(
            label(beside(desired), SPEC),
            lambda service: label(predictor_of(service), SPEC) == label(desired, SPEC),
            lambda service: replaced({**desired, PERCENT: percent}, predictor_of(service)),
        )

    def settle(self, predictor: Object, former: Object | None) -> Object:
        """Give a predictor all requests."""
        return self._end(label(predictor, SPEC), final(predictor), former)

    def take_back(self, spec: str) -> str:
        """Give all requests to the previous predictor; return the result as text.

        `spec` is the label of the failed predictor; another one is not changed.
        """
        existing = self.find()
        if existing is None:
            return "there is no service any more"
        if is_beside(existing, spec):
            service = self._advance(
                spec,
                lambda service: not trial_of(service),
                lambda service: ({"predictor": predictor_of(service)}, kept(service)),
            )
            former = predictor_of(service)
        elif (recorded := before(existing)) is None:
            if label(predictor_of(existing), SPEC) != spec:
                raise self.taken_over(existing)
            seen = {"preconditions": {"uid": existing["metadata"]["uid"]}}
            try:
                self.api.call("DELETE", self.path, {**DELETE, **seen}, retry=True)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise self._refused("delete", error) from error
            return f"InferenceService {self.name} was deleted, as nothing answered before"
        else:
            former = recorded
            self._end(spec, {**former, PERCENT: 0}, None)
        version = label(former, VERSION)
        return f"{self.name} answers with {version or 'the previous model'} as before"

    def _end(self, spec: str, predictor: Object, former: Object | None) -> Object:
        """Replace the predictor with this label."""

        def done(service: Object) -> bool:
            current = predictor_of(service)
            same = label(current, SPEC) == label(predictor, SPEC)
            return same and current.get(PERCENT) == predictor.get(PERCENT)

        return self._advance(spec, done, lambda _: replaced(predictor, former))

    def _advance(
        self, spec: str, done: Callable[[Object], bool], change: Callable[[Object], Change]
    ) -> Object:
        """Change the service, which has the predictor with this label, unless that is done."""

        def checked(existing: Object | None) -> Change | None:
            if existing and done(existing):
                return None
            if existing is None or spec not in specs_of(existing):
                raise self.taken_over(existing)
            return change(existing)

        return self._update(checked)

    def _update(self, change: Callable[[Object | None], Change | None]) -> Object:
        """Write the spec and the annotations that `change` returns for the service.

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
        run = deployed_by(trial_of(service) or predictor_of(service)) or "another writer"
        return JobError(f"InferenceService {self.name} was given another model by {run} meanwhile")

    def _put(
        self, spec: Object, annotations: Object, existing: Object | None, **query: str
    ) -> Object:
        metadata: dict[str, Any] = {"name": self.name, "labels": OURS, "annotations": annotations}
        if existing is not None:
            metadata["resourceVersion"] = existing["metadata"]["resourceVersion"]
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
        return self.api.retry(lambda: self.api.apply(self.path, body, **query))

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
    """Refuse a cluster without InferenceServices; raise InputError if KServe is not installed."""
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
    """Return the versions of bundles that managed services have, or would roll back to."""
    services = _managed(api, {404})
    predictors = [one or {} for s in services for one in (predictor_of(s), before(s), trial_of(s))]
    return {version for one in predictors if (version := label(one, VERSION))}


def take_back_of(api: Api, run_id: str) -> list[str]:
    """Roll back what a run has on trial, as after a cancel; return a line for each."""
    return [
        Service(api, service["metadata"]["name"]).take_back(label(unfinished, SPEC))
        for service in _managed(api, {403, 404})
        if (unfinished := trial_of(service) or (on_trial(service) and predictor_of(service)))
        and deployed_by(unfinished) == run_id
    ]


def _managed(api: Api, none: set[int]) -> list[Object]:
    """Return the managed services, with one of these HTTP statuses none; or raise JobError."""
    selector = ",".join(f"{name}={value}" for name, value in OURS.items())
    path, query = custom(API_VERSION, api.namespace, PLURAL), {"labelSelector": selector}
    try:
        services: list[Object] = api.call("GET", path, query=query, retry=True)["items"]
    except ApiError as error:
        if error.status in none:
            return []
        raise JobError(f"cannot list {PLURAL}: {one_line(error.message)}") from error
    return services
