"""What registries record of a bundle, and the stages of versions, which are the same in all."""

import json
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models.bundle import CONFIG, LARGEST_CONFIG, MANIFEST, METRICS, Bundle
from kfp_ddp.models.evaluation import LARGEST, Evaluation
from kfp_ddp.models.inference_service import storage_uri
from kfp_ddp.storage.store import Store
from kfp_ddp.training.spec.config import TrainConfig

Value = str | int | float | bool
STAGE = "stage"
"""Property of a version."""
CHAMPION = "champion"
"""Stage of a version, and what a model calls the version that has it."""
CANDIDATE = "candidate"
FORMER = "former"
ARCHIVED = "archived"
BUNDLE = "bundle"
"""Property with the URI of the bundle; only versions that have it are changed."""
MLFLOW_RUN = "mlflow_run_id"
"""Property with the run of MLflow that has the curves of the training."""
_FORMATS = (
    ("serving/{}/1/model.onnx", "/serving", "onnx"),
    (bundles.ONNX, "/model.onnx", "onnx"),
    (bundles.PROGRAM, "/model.pt2", "torch.export"),
    (bundles.WEIGHTS, "/model.safetensors", "safetensors"),
)
"""File, registered URI relative to the bundle, format: the first file that exists is used."""

_RESULTS = (
    *("dataset_digest", "checkpoint_digest", "image_size", "split", "samples"),
    *("accuracy", "accuracy_low", "accuracy_high"),
)


class Registry(Protocol):
    """A registry of models; all calls can be repeated."""

    address: str

    def check(self) -> None:
        """Raise an error if it does not respond or denies access; changes nothing."""

    def register(self, where: Store, model: str, version: str) -> str:
        """Register a bundle, a candidate until `agree`; return its id there."""

    def agree(self, where: Store, model: str) -> None:
        """Set the stages of versions with bundles here by CHAMPION, registered if it is missing."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a model as the registry stores it."""

    model: str
    version: str
    uri: str
    """URI for a server: the repository of the ONNX model in the bundle, or a file."""
    format: str
    description: str
    run_id: str
    properties: Mapping[str, Value]


def record_of(where: Store, name: str, version: str) -> RegisteredVersion:
    """Return the record of a bundle; raise InputError if it is missing, damaged or not readable."""
    if not re.fullmatch("[0-9a-f]{12}", version):
        raise InputError(f"version={version!r} is invalid: it has 12 hexadecimal digits")
    bundle = Bundle.at(where, f"{name}/{version}/", "the bundle", "publish it again")
    content = bundle.read(METRICS, LARGEST)
    if bundle.manifest is None or content is None or bundle.version != version:
        raise InputError(f"there is no complete bundle {bundle.uri} to register: publish it first")
    result = Evaluation.parse(content.decode(errors="replace"), f"{bundle.uri}/{METRICS}")
    config = mapping_in(bundle.read(CONFIG, LARGEST_CONFIG))
    lineage = bundle.lineage()
    verdict = mapping_in(bundle.read(VERDICT, LARGEST_CONFIG))
    uri, model_format = _served(bundle, name)
    properties = {
        BUNDLE: bundle.uri,
        "digest": bundle.digest,
        "signed": bundle.signature is not None,
        "run_id": lineage.get("run_id"),
        MLFLOW_RUN: lineage.get(MLFLOW_RUN),
        "compared_with": lineage.get("champion_version"),
        "published_at": lineage.get("exported_at"),
        "verdict": verdict.get("reason"),
        "architecture": result.model,
        "classes": len(result.classes),
        **{name: getattr(result, name) for name in _RESULTS},
        **_settings(config.get("training") or {}),
    }
    return RegisteredVersion(
        model=name,
        version=version,
        uri=uri,
        format=model_format,
        description=f"{result.model}, {result.accuracy:.2%} of {result.samples:,} images correct",
        run_id=str(lineage.get("run_id") or ""),
        properties=_as_values(properties),
    )


def _as_values(properties: Mapping[str, Any]) -> dict[str, Value]:
    """Return properties as the registry takes them, without empty ones; others become JSON."""
    values: dict[str, Value] = {}
    for key, value in properties.items():
        if isinstance(value, Value):
            values[key] = value
        elif value is not None:
            values[key] = json.dumps(value, sort_keys=True)
    return {key: value for key, value in values.items() if value != ""}


def _served(bundle: Bundle, name: str) -> tuple[str, str]:
    address = bundle.uri
    with suppress(InputError):  # of a local folder
        address = storage_uri(bundle.uri)
    for file, suffix, model_format in _FORMATS:
        if file.format(name) in bundle.listed:
            return address + suffix, model_format
    raise InputError(f"{bundle.uri} has no model to register: its {MANIFEST} does not list one")


def _settings(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings that differ from the defaults."""
    fields = TrainConfig.model_fields
    return {
        f"training.{name}": value
        for name, value in training.items()
        if name not in fields or value != fields[name].get_default(call_default_factory=True)
    }


def stage_of(version: str, champion: str, existing: Container[str], before: Value) -> str:
    """Return the stage of a version by CHAMPION, the bundles that exist, and its stage before."""
    if version == champion:
        return CHAMPION
    if version not in existing:
        return ARCHIVED
    return FORMER if before in (CHAMPION, FORMER) else CANDIDATE
