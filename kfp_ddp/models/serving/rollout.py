"""A new version of an InferenceService: begun, promoted, or taken back to the one before it.

While it is on trial its predictor has a share of the requests above 0, `canaryTrafficPercent`, and
the service remembers the predictor before it. So whoever comes later, after a crash or a cancel,
can tell an unfinished rollout, and end it. KServe shares requests out only with Knative.
"""

import hashlib
import json
import time
from typing import Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import DELETE, Api, ApiError, Object, custom
from kfp_ddp.models.serving.inference_service import API_VERSION, KIND

PLURAL = "inferenceservices"
POD_OF = "serving.kserve.io/inferenceservice"
"""The label that KServe gives the pods of a service."""
TAGGED = "serving.kserve.io/enable-tag-routing"
"""The annotation by which Knative gives the newest revision an address of its own."""
OURS = {"app.kubernetes.io/managed-by": "kfp-ddp"}
SPEC, VERSION = "kfp-ddp/spec", "kfp-ddp/version"
"""Labels of a predictor and its pods: what it was made of, and the bundle's version."""
RUN, BUNDLE = "kfp-ddp/run-id", "kfp-ddp/bundle"
"""Annotations of a predictor: who brought it, and where its bundle lies."""
BEFORE = "kfp-ddp/before"
"""Annotation of a service: the predictor that is put back where the new one does not answer."""
PERCENT = "canaryTrafficPercent"
_TIMES, _PAUSE = 10, 0.3


def signed(predictor: Object, version: str, uri: str, run_id: str) -> Object:
    """A predictor with what tells its pods from those of others.

    Args:
        predictor: As a manifest has it.
        version: Of the bundle.
        uri: Where the bundle lies.
        run_id: Of the run that brings it.
    """
    said = json.dumps([predictor, version], sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    labels = {SPEC: digest, VERSION: version}
    return {**predictor, "labels": labels, "annotations": {RUN: run_id, BUNDLE: uri}}


def label(predictor: Object, name: str) -> str:
    """A label of a predictor; '' for none."""
    return str((predictor.get("labels") or {}).get(name, ""))


def brought_by(predictor: Object) -> str:
    """The run that brought a predictor; '' where nobody knows."""
    return str((predictor.get("annotations") or {}).get(RUN, ""))


def predictor_of(service: Object) -> Object:
    """What a service answers with."""
    found: Object = service["spec"]["predictor"]
    return found


def _same(one: Object, other: Object) -> bool:
    return label(one, SPEC) == label(other, SPEC) and one.get(PERCENT) == other.get(PERCENT)


def on_trial(service: Object) -> bool:
    """Whether a rollout of it is not over."""
    return int(predictor_of(service).get(PERCENT) or 0) > 0


def before(service: Object) -> Object | None:
    """The predictor before the one that is on trial; None where there was no service."""
    said = (service["metadata"].get("annotations") or {}).get(BEFORE, "")
    found: Object | None = json.loads(said) if said else None
    return found


class Service:
    """An InferenceService of this namespace that is ours to change."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.path = custom(API_VERSION, api.namespace, PLURAL, name)

    def find(self) -> Object | None:
        """The service, None where there is none.

        Raises:
            InputError: KServe is not there, may not be asked, or the service is not ours.
        """
        try:
            found = self.api.call("GET", self.path, retry=True)
        except ApiError as error:
            if error.status != 404:
                raise self._refused("get", error) from error
            served(self.api)
            return None
        labels = found["metadata"].get("labels") or {}
        if not labels.items() >= OURS.items():
            raise InputError(
                f"InferenceService {self.name} in {self.api.namespace} was not made by kfp-ddp and "
                "is left alone; name another service, or hand it over with kubectl label "
                f"inferenceservice {self.name} app.kubernetes.io/managed-by=kfp-ddp"
            )
        return found

    def begin(self, wanted: Object, percent: int) -> Object:
        """Put a predictor on trial, unless it is what the service answers with already.

        A rollout that somebody left unfinished is succeeded: what was before it stays remembered.

        Args:
            wanted: The predictor, signed.
            percent: Share of the requests that it gets.

        Raises:
            InputError: it may not, or the server does not take it.
        """
        for _ in range(_TIMES):
            there = self.find()
            if there is None:
                former = None
            elif on_trial(there):
                former = before(there)
            elif label(predictor_of(there), SPEC) == label(wanted, SPEC):
                return there
            else:
                former = predictor_of(there)
            try:
                return self._put({**wanted, PERCENT: percent}, former, there)
            except ApiError as error:
                if error.status != 409:
                    raise self._refused("patch", error) from error
                time.sleep(_PAUSE)  # it was changed since it was read
        raise JobError(f"InferenceService {self.name} is changed by others all the time; try later")

    def settle(self, predictor: Object, former: Object | None) -> Object:
        """Let a predictor have all requests.

        Raises:
            InputError: it may not.
            JobError: another run has brought another one meanwhile.
        """
        settled = {name: value for name, value in predictor.items() if name != PERCENT}
        return self._end(label(predictor, SPEC), settled, former)

    def take_back(self, spec: str) -> str:
        """Give all requests back to what was before, at once; in words what became of it.

        Args:
            spec: Label of the predictor that has failed; another one is left alone.

        Raises:
            InputError: it may not.
            JobError: another run has brought another one meanwhile.
        """
        there = self.find()
        if there is None:
            return "there is no service any more"
        if (former := before(there)) is None:
            self._delete(there, spec)
            return f"InferenceService {self.name} was deleted, as nothing answered before"
        self._end(spec, {**former, PERCENT: 0}, None)
        version = label(former, VERSION)
        return f"{self.name} answers with {version or 'what was'} as before"

    def _end(self, spec: str, predictor: Object, former: Object | None) -> Object:
        """Put a predictor in the place of the one with this label."""
        for _ in range(_TIMES):
            there = self.find()
            now = predictor_of(there) if there else {}
            if there and _same(now, predictor):
                return there
            if there is None or label(now, SPEC) != spec:
                raise self.taken_over(there)
            try:
                return self._put(predictor, former, there)
            except ApiError as error:
                if error.status != 409:
                    raise self._refused("patch", error) from error
                time.sleep(_PAUSE)
        raise JobError(f"InferenceService {self.name} is changed by others all the time; try later")

    def taken_over(self, there: Object | None) -> JobError:
        """The error of a rollout whose predictor is not the service's any more."""
        if there is None:
            return JobError(f"InferenceService {self.name} was deleted while it was rolled out")
        run = brought_by(predictor_of(there)) or "somebody else"
        return JobError(f"InferenceService {self.name} was given another model by {run} meanwhile")

    def _put(self, predictor: Object, former: Object | None, there: Object | None) -> Object:
        annotations = {TAGGED: "true"}
        if former is not None:
            kept = {name: value for name, value in former.items() if name != PERCENT}
            annotations[BEFORE] = json.dumps(kept, sort_keys=True, separators=(",", ":"))
        metadata: dict[str, Any] = {"name": self.name, "labels": OURS, "annotations": annotations}
        if there is not None:
            metadata["resourceVersion"] = there["metadata"]["resourceVersion"]
        kind = {"apiVersion": API_VERSION, "kind": KIND}
        body = {**kind, "metadata": metadata, "spec": {"predictor": predictor}}
        return self.api.retry(lambda: self.api.apply(self.path, body))

    def _delete(self, there: Object, spec: str) -> None:
        if label(predictor_of(there), SPEC) != spec:
            raise self.taken_over(there)
        seen = {"preconditions": {"uid": there["metadata"]["uid"]}}
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
        said = one_line(error.message)
        return InputError(f"the cluster refused InferenceService {self.name}: {said}")


def served(api: Api) -> None:
    """Refuse a cluster without InferenceServices.

    Raises:
        InputError: saying what to do.
    """
    try:
        found = api.call("GET", f"/apis/{API_VERSION}", retry=True)["resources"]
    except ApiError as error:
        if error.status != 404:
            return  # who may not look there is told when it is used
        found = []
    if not any(each["name"] == PLURAL for each in found):
        raise InputError(
            f"this cluster has no {PLURAL} ({API_VERSION}); install KServe, or leave service of "
            "release empty"
        )


def in_service(api: Api) -> set[str]:
    """The versions of bundles that services of ours answer with, or would go back to.

    Raises:
        JobError: that cannot be seen.
    """
    try:
        found = _ours(api)
    except ApiError as error:
        if error.status == 404:
            return set()
        raise JobError(f"cannot list {PLURAL}: {one_line(error.message)}") from error
    predictors = [each for one in found for each in (predictor_of(one), before(one)) if each]
    return {version for each in predictors if (version := label(each, VERSION))}


def take_back_of(api: Api, run_id: str) -> list[str]:
    """Take back what a run has on trial, as where it was cancelled; a line for each.

    Raises:
        JobError: it could not be.
    """
    try:
        found = _ours(api)
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise JobError(f"cannot list {PLURAL}: {one_line(error.message)}") from error
    return [
        Service(api, each["metadata"]["name"]).take_back(label(predictor_of(each), SPEC))
        for each in found
        if on_trial(each) and brought_by(predictor_of(each)) == run_id
    ]


def _ours(api: Api) -> list[Object]:
    selector = ",".join(f"{name}={value}" for name, value in OURS.items())
    path, query = custom(API_VERSION, api.namespace, PLURAL), {"labelSelector": selector}
    found: list[Object] = api.call("GET", path, query=query, retry=True)["items"]
    return found
