"""Load the model of a bundle, verify it, and test it with the bundle's sample."""

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
    """A model that is ready to serve."""

    name: str
    """Name in the bundle's model repository."""
    version: str
    """Version of the bundle."""
    uri: str
    file: str
    classes: tuple[str, ...]
    loaded: Loaded


def ready(bundle: str, variant: str = "", runtime: str = "", threads: int = 0) -> Ready:
    """Load a model of a bundle; each file that is read is verified by the manifest.

    Args:
        bundle: Folder or URI of a bundle.
        variant: Further format of the model, such as int8; empty for the model itself.
        runtime: Name of the runtime; empty for the installed one.
        threads: Threads of one call; 0 for the default of the runtime.

    Raises:
        InputError: The bundle is incomplete, the format is missing, or the test fails.
    """
    sealed = open_bundle(bundle)
    file = _file(sealed, variant)
    content = sealed.read(file, _LARGEST_MODEL)
    if content is None:
        raise InputError(f"the bundle {sealed.uri} has no {file}, so no server can load it")
    loaded = load(content, runtime, threads)
    classes = json.loads(sealed.read("classes.json", _LARGEST_JSON) or b"[]")
    _test(sealed, loaded, exact=not variant)
    return Ready(sealed.model_name, sealed.version, sealed.uri, file, tuple(classes), loaded)


def _file(sealed: Bundle, variant: str) -> str:
    """Return the file of a format of the model."""
    if not variant:
        return MODEL
    content = sealed.read(variants.FILE, variants.LARGEST)
    record = variants.Record.model_validate_json(content) if content else variants.Record()
    files = {one.name: one.file for one in record.variants if one.file.endswith(".onnx")}
    if variant not in files:
        why = record.left_out.get(variant, "")
        raise InputError(
            f"the bundle {sealed.uri} has no variant {variant} to serve"
            + (f" ({why})" if why else "")
            + f": it has {', '.join(files) or 'none'}"
        )
    return files[variant]


def _test(sealed: Bundle, loaded: Loaded, exact: bool) -> None:
    """Compare the answer to the bundle's sample; older bundles have no sample."""
    request = sealed.read(REQUEST, _LARGEST_JSON)
    response = sealed.read(RESPONSE, _LARGEST_JSON)
    shape = [max(size, 1) for size in loaded.entry[1]]
    if request is None or response is None:
        loaded(np.zeros(shape, np.uint8))
        return
    (sample,), answer = json.loads(request)["inputs"], json.loads(response)
    logits = loaded(np.array(sample["data"], np.uint8).reshape(sample["shape"]))
    (output,) = answer["outputs"]
    expected = np.array(output["data"], np.float32).reshape(output["shape"])
    allowed = answer["parameters"]["allowed_abs_difference"] if exact else np.inf
    if logits.shape != expected.shape or not np.abs(logits - expected).max() <= allowed:
        raise InputError(
            f"{loaded.runtime} does not answer the sample of {sealed.uri} as the bundle does: "
            "try another runtime, and report both versions"
        )
