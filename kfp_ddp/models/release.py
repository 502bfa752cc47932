"""What a blessed model is published as, and where: settings that the steps after the gate share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from kfp_ddp.core.settings import Settings, split
from kfp_ddp.core.step import KEY_NAME, KEY_NAME_MEANING
from kfp_ddp.jobs.launch_spec import IN_WORDS
from kfp_ddp.k8s.quantity import AMOUNT, QUANTITY
from kfp_ddp.models.serving.inference_service import OURS, Runtime

SERVICE = r"^$|^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"

ADDRESS = r"^$|^https?://[^\s/?#@]+(/[^\s?#]*)?$"
Variant = Literal["fp16", "int8", "resize"]
_RETIRED = "aoti"


def _refuse_retired(name: object) -> object:
    if name == _RETIRED:
        raise ValueError(f"the form {_RETIRED} was retired, remove it from variants")
    return name


class Variants(Settings):
    """Further forms of the model in its bundle."""

    variants: tuple[Annotated[Variant, BeforeValidator(_refuse_retired)], ...] = ()
    """Further model files, each evaluated on the complete split: fp16, int8 (calibrated on training
    images), resize (takes decoded images of any size, resizes and crops them)."""
    max_variant_drop: float = Field(0.02, ge=0, le=1)
    """Accuracy that a further form may lose, a share; one that loses more is left out."""
    calibration_images: int = Field(256, ge=1, le=10_000)
    """Training images that int8 takes the ranges of its numbers from."""


class Signing(Settings):
    """With what the manifest of a bundle is signed."""

    patterns: ClassVar = {KEY_NAME: KEY_NAME_MEANING}

    sign_key: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret that holds a private key in PEM, on P-256, P-384, P-521 or
    Ed25519: the bundle gets a signature by it, model.sig; empty for none."""
    sign_password: str = Field("", pattern=KEY_NAME)
    """Key of that secret that holds the password of sign_key; empty where it has none."""


class Registering(Settings):
    """The registry of models that is told of a bundle."""

    patterns: ClassVar = {
        KEY_NAME: KEY_NAME_MEANING,
        ADDRESS: "an address such as http://model-registry-service.kubeflow:8080",
    }

    registry: str = Field("", pattern=ADDRESS)
    """Kubeflow Model Registry that is told of each bundle and of who is the champion, by the
    address of its REST API, such as http://model-registry-service.kubeflow:8080; empty for none."""
    registry_token: str = Field("", pattern=KEY_NAME)
    """Key of the bucket's secret that holds a bearer token for it; empty for that of the pod's
    service account, which is sent over https alone."""
    registry_author: str = Field("kfp-ddp", min_length=1, max_length=63)
    """Who the registry has as owner of the model and author of its versions."""


class Deployment(Settings):
    """The service that answers with the model."""

    patterns: ClassVar = {SERVICE: "the name of a service", AMOUNT: IN_WORDS[QUANTITY]}

    service: str = Field("", pattern=SERVICE)
    """InferenceService of KServe that answers with the champion, made where it is not there: at
    most 40 small letters, digits and dashes; empty for none."""
    service_runtime: Runtime = "kserve-tritonserver"
    """What serves it: a ClusterServingRuntime of KServe, or kfp-ddp, our own server."""
    service_image: str = ""
    """Image of our own server, with this package and its extra serve."""
    service_account: str = ""
    """Kubernetes service account whose secrets let KServe read the bucket; empty for the default
    one."""
    service_replicas: int = Field(1, ge=1)
    """Pods of the service, at least."""
    service_cpu: str = Field("1", pattern=AMOUNT)
    """CPUs that a pod of the service asks for and may use."""
    service_memory: str = Field("2Gi", pattern=AMOUNT)
    """Memory that a pod of the service asks for and may use."""
    service_minutes: float = Field(15, gt=0)
    """The longest wait for the service to be ready, in minutes; then it is taken back."""
    canary_percent: int = Field(10, ge=1, le=100)
    """Share of the requests that a new model gets before it has answered the sample of its bundle;
    where KServe runs without Knative it gets all."""
    canary_requests: int = Field(3, ge=1, le=1000)
    """How often in a row it has to answer the sample as the bundle says."""
    canary_seconds: float = Field(10, gt=0)
    """In which it has to answer once."""

    @model_validator(mode="after")
    def _ours_has_an_image(self) -> Self:
        if self.service and self.service_runtime == OURS and not self.service_image:
            raise ValueError(
                f"service_runtime={OURS} needs service_image: one with this package and its extra "
                "serve"
            )
        return self


M = TypeVar("M", bound=Settings)
MODELS: tuple[type[Settings], ...] = (Variants, Signing, Registering, Deployment)


def part_of(release: Mapping[str, Any], model: type[M]) -> M:
    """One of the parts of a release.

    Args:
        release: Settings of all parts by name.
        model: Of the part.

    Raises:
        InputError: a name that no part has, or a value of this one that cannot be used.
    """
    parts = dict(zip(MODELS, split("release", release, *MODELS, own={}), strict=True))
    return model.create(**parts[model])
