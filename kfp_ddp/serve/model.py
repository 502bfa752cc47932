"""What is served: a bundle's model, verified and loaded, and tried before anybody asks it."""

import json
from dataclasses import dataclass

import numpy as np

from kfp_ddp.core.errors import InputError
from kfp_ddp.models import variants
from kfp_ddp.models.bundle import REQUEST, RESPONSE, Bundle
from kfp_ddp.models.champion import open_bundle
from kfp_ddp.models.onnx_runtimes import Loaded, load

MODEL = "model.onnx"
_LARGEST_MODEL = 16 << 30
_LARGEST_JSON = 64 << 20


@dataclass(frozen=True)
class Ready:
    """A model that answers."""

    name: str
    """In the bundle's model repository."""
    version: str
    """Of the bundle."""
    uri: str
    file: str
    classes: tuple[str, ...]
    loaded: Loaded


def ready(bundle: str, variant: str = "", runtime: str = "", threads: int = 0) -> Ready:
    """Load a model of a bundle, each of whose files that is read is what its manifest lists.

    Args:
        bundle: Folder or address, as `open_bundle` takes it.
        variant: A further form of the model, such as int8; empty for the model itself.
        runtime: What computes it; empty for what is installed.
        threads: That one call may use; 0 for as many as the runtime thinks fit.

    Raises:
        InputError: there is no whole bundle or no such form, or it does not say what it should.
    """
    sealed = open_bundle(bundle)
    file = _file(sealed, variant)
    content = sealed.read(file, _LARGEST_MODEL)
    if content is None:
        raise InputError(f"the bundle {sealed.uri} has no {file}, so no server can load it")
    loaded = load(content, runtime, threads)
    classes = json.loads(sealed.read("classes.json", _LARGEST_JSON) or b"[]")
    _try(sealed, loaded, exact=not variant)
    return Ready(sealed.model_name, sealed.version, sealed.uri, file, tuple(classes), loaded)


def _file(sealed: Bundle, variant: str) -> str:
    """The file of a form of the model."""
    if not variant:
        return MODEL
    told = sealed.read(variants.FILE, variants.LARGEST)
    record = variants.Record.model_validate_json(told) if told else variants.Record()
    files = {one.name: one.file for one in record.variants if one.file.endswith(".onnx")}
    if variant not in files:
        why = record.left_out.get(variant, "")
        raise InputError(
            f"the bundle {sealed.uri} has no variant {variant} to serve"
            + (f" ({why})" if why else "")
            + f": it has {', '.join(files) or 'none'}"
        )
    return files[variant]


def _try(sealed: Bundle, loaded: Loaded, exact: bool) -> None:
    """Ask for the bundle's own sample; one of an older bundle, without any, is only asked."""
    request = sealed.read(REQUEST, _LARGEST_JSON)
    response = sealed.read(RESPONSE, _LARGEST_JSON)
    shape = [max(size, 1) for size in loaded.entry[1]]
    if request is None or response is None:
        loaded(np.zeros(shape, np.uint8))
        return
    (asked,), said = json.loads(request)["inputs"], json.loads(response)
    found = loaded(np.array(asked["data"], np.uint8).reshape(asked["shape"]))
    (expected,) = said["outputs"]
    wanted = np.array(expected["data"], np.float32).reshape(expected["shape"])
    allowed = said["parameters"]["allowed_abs_difference"] if exact else np.inf
    if found.shape != wanted.shape or not np.abs(found - wanted).max() <= allowed:
        raise InputError(
            f"{loaded.runtime} does not answer the sample of {sealed.uri} as the bundle does: "
            "try another runtime, and report both versions"
        )
