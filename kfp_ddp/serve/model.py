"""Load the model of a bundle, verify it, and test it with the bundle's sample."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.models import variants
from kfp_ddp.models.bundle import LARGEST_MODEL, ONNX, Bundle
from kfp_ddp.models.champion import open_bundle
from kfp_ddp.models.interface import Interface, read_interface, read_sample
from kfp_ddp.models.onnx_runtimes import Loaded, load

if TYPE_CHECKING:
    from kfp_ddp.models.signature import Signer


@dataclass(frozen=True)
class Ready:
    """A model that is ready to serve."""

    name: str
    """Name in the bundle's model repository."""
    version: str
    """Version of the bundle."""
    uri: str
    file: str
    interface: Interface
    loaded: Loaded

    @property
    def form(self) -> tuple[int, int, str, str]:
        """Arguments of `square` after the picture; a model for any size crops it itself."""
        _, short_side, size, background, value_range = self.interface
        size = short_side if -1 in self.loaded.entry[1][2:] else size
        return short_side, size, background, value_range


def ready(
    bundle: str,
    variant: str = "",
    runtime: str = "",
    threads: int = 0,
    signer: "Signer | None" = None,
) -> Ready:
    """Load and test a verified model of a bundle; raise InputError.

    `variant` is a further format, such as int8; others are as of `onnx_runtimes.load`.
    """
    sealed = open_bundle(bundle, signer=signer)
    file = _file(sealed, variant)
    content = sealed.read(file, LARGEST_MODEL)
    if content is None:
        raise InputError(f"the bundle {sealed.uri} has no {file}, so no server can load it")
    loaded = load(content, runtime, threads)
    interface = read_interface(sealed)
    _test(sealed, loaded, exact=not variant)
    return Ready(sealed.model_name, sealed.version, sealed.uri, file, interface, loaded)


def _file(sealed: Bundle, variant: str) -> str:
    """Return the file of a format of the model."""
    if not variant:
        return ONNX
    record = variants.read(sealed)
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
    sample = read_sample(sealed)
    try:
        if sample is None:
            loaded(np.zeros([max(size, 1) for size in loaded.entry[1]], np.uint8))
            return
        logits = loaded(np.array(sample.image.data, np.uint8).reshape(sample.image.shape))
    except Exception as error:
        raise sealed.damaged(
            f"{loaded.runtime} cannot compute its sample ({one_line(error)})"
        ) from error
    expected = np.array(sample.logits, np.float32)
    allowed = sample.allowed if exact else np.inf
    if logits.size != expected.size or not np.abs(logits.ravel() - expected).max() <= allowed:
        raise InputError(
            f"{loaded.runtime} does not answer the sample of {sealed.uri} as the bundle does: "
            "try another runtime, and report both versions"
        )
