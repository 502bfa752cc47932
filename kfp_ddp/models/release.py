"""Settings of a release, which the steps after the gate share."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import Settings, split
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING
from kfp_ddp.k8s.objects import AMOUNT, DESCRIPTIONS, QUANTITY
from kfp_ddp.models.inference_service import OURS, Runtime

SERVICE = r"^$|^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"

MLFLOW = "mlflow"
"""Value of registry for the server that MLFLOW_TRACKING_URI names."""
REGISTRY = rf"^$|^{MLFLOW}$|^https?://[^\s/?#@]+(/[^\s?#]*)?$"
Variant = Literal["fp16", "int8"]
"""Names of the further forms of a model; each has a file (models/variants.py) and a writer
(export/variants.py)."""


class Variants(Settings):
    """Further forms of the model in its bundle."""

    variants: tuple[Variant, ...] = ()
    """Further model files, each evaluated on the complete split: fp16, int8 (calibrated on training
    images)."""
    max_variant_drop: float = Field(0.02, ge=0, le=1)
    """Largest loss of accuracy of a further form, as a share; one that loses more is left out."""
    calibration_images: int = Field(256, ge=1, le=10_000)
    """Number of training images that calibrate int8."""


ChampionKey = Annotated[
    str,
    Field(
        pattern=KEY_NAME,
        description="Key of the bucket's secret with a public key in PEM, which must verify the "
        "champion's\nsignature before anything of it is used; empty for no verification.",
    ),
]
"""Of the gate and of the evaluation before it."""


class Signing(Settings):
    """The signature of a bundle."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}

    sign_key: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret with a private key in PEM, on P-256, P-384, P-521 or Ed25519, that
    signs the bundle in model.sig; empty for no signature."""
    sign_password: str = Field("", pattern=KEY_NAME)
    """Key of that secret with the password of sign_key; empty for none."""


class Registering(Settings):
    """The registry of models."""

    patterns: ClassVar = {
        KEY_NAME: KEY_NAME_MEANING,
        REGISTRY: "an address such as http://model-registry-service.kubeflow:8080, or the word "
        "mlflow",
    }

    registry: str = Field("", pattern=REGISTRY)
    """Registry in which each bundle and the champion are registered: the address of the REST API of
    Kubeflow Model Registry, such as http://model-registry-service.kubeflow:8080, or mlflow for the
    server that MLFLOW_TRACKING_URI names; empty for none."""
    registry_token: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret with a bearer token for Kubeflow Model Registry; empty for the
    token of the pod's service account, which is sent over https only."""
    registry_author: str = Field("kfp-ddp", min_length=1, max_length=63)
    """Owner of the model and author of its versions in the registry."""

    @model_validator(mode="after")
    def _valid_token(self) -> Self:
        if self.registry == MLFLOW and self.registry_token:
            raise ValueError(
                "registry_token has no effect with registry=mlflow: leave it out, and add "
                "MLFLOW_TRACKING_TOKEN as a key of the bucket's secret"
            )
        return self


class Deployment(Settings):
    """The service of the model."""

    patterns: ClassVar = {SERVICE: "the name of a service", AMOUNT: DESCRIPTIONS[QUANTITY]}

    service: str = Field("", pattern=SERVICE)
    """InferenceService of KServe for the champion, created if missing: at most 40 small letters,
    digits and dashes; empty for none."""
    service_runtime: Runtime = "kserve-tritonserver"
    """Its server: a ClusterServingRuntime of KServe, or kfp-ddp, our own server."""
    service_image: str = ""
    """Image of our own server, with this package and its extra serve."""
    service_account: str = ""
    """Kubernetes service account whose secrets let KServe read the bucket; empty for the default
    one."""
    service_replicas: int = Field(1, ge=1)
    """Number of pods of the service, or the smallest if it follows the load."""
    service_max_replicas: int = Field(0, ge=0)
    """Largest number of pods, more than service_replicas: the number follows the load, without
    Knative by a HorizontalPodAutoscaler, which needs a metrics server. 0 for a fixed number, with
    Knative for no limit."""
    service_cpu: str = Field("1", pattern=AMOUNT)
    """Request and limit of CPUs of a pod of the service."""
    service_memory: str = Field("2Gi", pattern=AMOUNT)
    """Request and limit of memory of a pod of the service."""
    service_minutes: float = Field(15, gt=0)
    """Timeout for the service to become ready, in minutes; then it is rolled back."""
    canary_requests: int = Field(3, ge=1, le=1000)
    """Required number of correct answers to the sample of the bundle in a row."""
    canary_seconds: float = Field(10, gt=0)
    """Timeout of one answer in seconds."""

    @model_validator(mode="after")
    def _valid_service(self) -> Self:
        if 0 < self.service_max_replicas <= self.service_replicas:
            raise ValueError(
                f"service_max_replicas={self.service_max_replicas} is not above service_replicas="
                f"{self.service_replicas}: raise it, or leave it out for a fixed number of pods"
            )
        is_ours = self.service != "" and self.service_runtime == OURS
        if is_ours and not self.service_image:
            raise ValueError(
                f"service_runtime={OURS} needs service_image: one with this package and its extra "
                "serve"
            )
        return self


def check_model_name(model_name: str) -> None:
    """Refuse a name that cannot be a folder of a model server."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", model_name):
        raise InputError(
            f"model_name is {model_name!r}: it becomes a folder, so use 1 to 63 letters, digits, "
            "dots, dashes and underscores, a letter or digit first"
        )


M = TypeVar("M", bound=Settings)
MODELS: tuple[type[Settings], ...] = (Variants, Signing, Registering, Deployment)


def part_of(release: Mapping[str, Any], model: type[M]) -> M:
    """Return one part of a release, which has the settings of all parts by name."""
    parts = dict(zip(MODELS, split("release", release, *MODELS), strict=True))
    return model.create(**parts[model])
