"""The predictors of an InferenceService, and how far a rollout of one has come.

In KServe's Standard mode the new predictor is first tried beside the answering one, as a canary
without requests. Then, or at once with Knative, it takes the place of the other: until the rollout
ends it has a share of the requests above 0, `canaryTrafficPercent`, and an annotation of the
service has the previous predictor. The service alone so tells a later step how far a rollout came,
after a crash or a cancel. KServe splits requests only with Knative.
"""

import hashlib
import json

from kfp_ddp.k8s.api import Object
from kfp_ddp.models.serving.inference_service import DRAIN_SECONDS

POD_OF = "serving.kserve.io/inferenceservice"
"""The label that KServe gives the pods of a service."""
TAGGED = "serving.kserve.io/enable-tag-routing"
"""The annotation that makes Knative give the newest revision its own address."""
SPEC, VERSION = "kfp-ddp/spec", "kfp-ddp/version"
"""Labels of a predictor and its pods: a digest of its spec, and the bundle's version."""
RUN, BUNDLE = "kfp-ddp/run-id", "kfp-ddp/bundle"
"""Annotations of a predictor: the run that deployed it, and the URI of its bundle."""
BEFORE = "kfp-ddp/before"
"""Annotation of a service: the predictor that a rollback restores."""
PERCENT = "canaryTrafficPercent"
TRIAL = "trial"
"""Name of the predictor that is tried beside the answering one, in that of its Deployment."""
AUTOSCALER = "serving.kserve.io/autoscalerClass"
MODE = "serving.kserve.io/deploymentMode"


def signed(predictor: Object, version: str, uri: str, run_id: str) -> Object:
    """Return a predictor of a manifest with labels and annotations that identify its pods."""
    content = json.dumps([predictor, version], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    labels = {SPEC: digest, VERSION: version}
    annotations = {RUN: run_id, BUNDLE: uri}
    if "maxReplicas" not in predictor:
        # Without it KServe makes a HorizontalPodAutoscaler, which needs a metrics server.
        annotations[AUTOSCALER] = "none"
    return {**predictor, "labels": labels, "annotations": annotations}


def in_standard_mode(service: Object) -> bool:
    """Return whether KServe runs a service without Knative; its webhook sets the annotation."""
    mode = (service["metadata"].get("annotations") or {}).get(MODE)
    return mode in ("Standard", "RawDeployment")


def drained(predictor: Object) -> Object:
    """Return a predictor whose pods wait before they stop; our server does so itself.

    Knative does the same, and refuses this.
    """
    if "model" not in predictor:
        return predictor
    wait = {"preStop": {"exec": {"command": ["sleep", str(DRAIN_SECONDS)]}}}
    return {**predictor, "model": {**predictor["model"], "lifecycle": wait}}


def label(predictor: Object, name: str) -> str:
    """Return a label of a predictor; '' for none."""
    return str((predictor.get("labels") or {}).get(name, ""))


def deployed_by(predictor: Object) -> str:
    """Return the run that deployed a predictor; '' if unknown."""
    return str((predictor.get("annotations") or {}).get(RUN, ""))


def predictor_of(service: Object) -> Object:
    """Return the predictor of a service that answers requests."""
    predictor: Object = service["spec"]["predictor"]
    if trial_of(service):
        predictor = {**predictor, "minReplicas": predictor["minReplicas"] - 1}
    return predictor


def trial_of(service: Object) -> Object:
    """Return the predictor that is tried beside the answering one; {} for none."""
    canary: list[Object] = service["spec"].get("canary") or [{}]
    trial: Object = canary[0].get("predictor") or {}
    return trial if trial.get("name") == TRIAL else {}


def is_beside(service: Object, spec: str) -> bool:
    """Return whether the predictor with this label is tried beside the answering one."""
    trial = trial_of(service)
    return bool(trial) and label(trial, SPEC) == spec


def beside(desired: Object) -> Object:
    """Return a predictor as one that is tried beside the answering one: with one pod."""
    predictor = {name: value for name, value in desired.items() if name != "maxReplicas"}
    labels = {**desired["labels"], SPEC: f"{label(desired, SPEC)}-{TRIAL}"}
    # KServe would not delete the autoscaler of a canary.
    annotations = {**desired["annotations"], AUTOSCALER: "none"}
    more = {"name": TRIAL, "minReplicas": 1, "labels": labels, "annotations": annotations}
    return {**predictor, **more}


def can_be_beside(service: Object, answering: Object, desired: Object) -> bool:
    """Return whether KServe can try a predictor beside the answering one.

    It completes a canary with the fields of the answering predictor, so that may not have others.
    """

    def fields(predictor: Object) -> set[str]:
        model = {f"model.{name}": value for name, value in (predictor.get("model") or {}).items()}
        return {name for name, value in {**predictor, **model}.items() if value}

    others = service["spec"].get("canary") and not trial_of(service)
    ignored = {PERCENT, "maxReplicas", "minReplicas"}
    if others or not in_standard_mode(service):
        return False
    return fields(answering) - ignored <= fields(desired)


def on_trial(service: Object) -> bool:
    """Return whether a rollout is unfinished."""
    return int(predictor_of(service).get(PERCENT) or 0) > 0


def before(service: Object) -> Object | None:
    """Return the predictor before the one on trial; None if there was no service."""
    text = (service["metadata"].get("annotations") or {}).get(BEFORE, "")
    predictor: Object | None = json.loads(text) if text else None
    return predictor


def specs_of(service: Object) -> set[str]:
    """Return the labels SPEC of the predictors of a service."""
    return {label(predictor_of(service), SPEC), label(trial_of(service), SPEC)}


def final(predictor: Object) -> Object:
    """Return a predictor with all requests."""
    return {name: value for name, value in predictor.items() if name != PERCENT}


def kept(service: Object) -> dict[str, str]:
    """Return the annotations of a service whose pods may not restart."""
    annotations = service["metadata"].get("annotations") or {}
    return {name: annotations[name] for name in (TAGGED, BEFORE) if name in annotations}


Change = tuple[Object, dict[str, str]]
"""Spec and annotations of a service."""


def replaced(predictor: Object, former: Object | None) -> Change:
    """Return a service with this predictor, and the one that a rollback restores.

    KServe copies the annotations to the pods: they restart if one changes.
    """
    annotations = {TAGGED: "true"}
    if former is not None:
        annotations[BEFORE] = json.dumps(final(former), sort_keys=True, separators=(",", ":"))
    return {"predictor": predictor}, annotations
