"""What a registry is told of a version: all from the bundle, so that it can be told again."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.run_folder import VERDICT
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.models.bundle import LARGEST_CONFIG, LARGEST_SIGNATURE, MANIFEST, METRICS, SIGNATURE
from kfp_ddp.models.evaluation import LARGEST, Evaluation
from kfp_ddp.models.lineage import FILE as LINEAGE
from kfp_ddp.models.sealed import Sealed
from kfp_ddp.models.serving.inference_service import storage_uri
from kfp_ddp.storage.destination import Destination
from kfp_ddp.training.config import TrainConfig

Value = str | int | float | bool
BUNDLE = "bundle"
"""The property that holds the address of the bundle, by which its version is known to be ours."""
_FORMATS = (
    ("serving/{}/1/model.onnx", "/serving", "onnx"),
    ("model.onnx", "/model.onnx", "onnx"),
    ("model.pt2", "/model.pt2", "torch.export"),
    ("model.safetensors", "/model.safetensors", "safetensors"),
)
"""The first that a bundle has: the file, what is registered of the bundle, and its format."""


@dataclass(frozen=True)
class Record:
    """A version of a model in the words of the registry."""

    model: str
    version: str
    uri: str
    """What a server is pointed at: the repository of the ONNX model in the bundle, or a file."""
    format: str
    description: str
    run_id: str
    properties: Mapping[str, Value]


def record_of(where: Destination, name: str, version: str) -> Record:
    """What a bundle at a destination says of itself.

    Args:
        where: The destination.
        name: Of the model.
        version: Of the bundle.

    Raises:
        InputError: it is missing, damaged or cannot be read.
    """
    if not re.fullmatch("[0-9a-f]{12}", version):
        raise InputError(f"version={version!r} is none: it is 12 hexadecimal digits")
    sealed = Sealed.at(where, f"{name}/{version}/", "the bundle", "publish it again")
    content = sealed.read(METRICS, LARGEST)
    if sealed.listed is None or content is None or sealed.version != version:
        raise InputError(f"there is no whole bundle {sealed.uri} to register: publish it first")
    result = Evaluation.parse(content.decode(errors="replace"), f"{sealed.uri}/{METRICS}")
    config = mapping_in(sealed.read("config.json", LARGEST_CONFIG))
    lineage = mapping_in(sealed.read(LINEAGE, LARGEST_CONFIG)) or config.get("lineage") or {}
    verdict = mapping_in(sealed.read(VERDICT, LARGEST_CONFIG))
    place, form = _served(sealed, name)
    signed = where.read(f"{sealed.folder}{SIGNATURE}", LARGEST_SIGNATURE) is not None
    properties = {
        BUNDLE: sealed.uri,
        "digest": sealed.digest,
        "signed": signed,
        "run_id": lineage.get("run_id"),
        "dataset_digest": result.dataset_digest,
        "checkpoint_digest": result.checkpoint_digest,
        "compared_with": lineage.get("champion_version"),
        "published_at": lineage.get("exported_at"),
        "verdict": verdict.get("reason"),
        "architecture": result.model,
        "classes": len(result.classes),
        "image_size": result.image_size,
        "split": result.split,
        "samples": result.samples,
        "accuracy": result.accuracy,
        "accuracy_low": result.accuracy_low,
        "accuracy_high": result.accuracy_high,
        **_settings(config.get("training") or {}),
    }
    said = f"{result.model}, {result.accuracy:.2%} of {result.samples:,} images right"
    told = {key: _value(each) for key, each in properties.items() if each not in (None, "")}
    return Record(name, version, place, form, said, str(lineage.get("run_id") or ""), told)


def _served(sealed: Sealed, name: str) -> tuple[str, str]:
    listed = sealed.listed or {}
    try:
        address = storage_uri(sealed.uri)
    except InputError:  # a folder, which no server of a cluster reads
        address = sealed.uri
    for file, below, form in _FORMATS:
        if file.format(name) in listed:
            return address + below, form
    raise InputError(f"{sealed.uri} has no model to register: its {MANIFEST} lists none")


def _settings(training: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the training that are not the defaults."""
    fields = TrainConfig.model_fields
    return {
        f"training.{name}": value
        for name, value in training.items()
        if name not in fields or value != fields[name].get_default(call_default_factory=True)
    }


def _value(value: Any) -> Value:
    return value if isinstance(value, Value) else json.dumps(value, sort_keys=True)
