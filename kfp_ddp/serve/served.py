"""A verified model of a bundle for KServe, which computes images of concurrent calls together."""

import asyncio
import base64
import re
import struct
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model
from kserve.errors import InvalidInput, ServerNotReady
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from numpy.typing import NDArray
from prometheus_client import Gauge, Histogram

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line
from kfp_ddp.models import doubt, variants
from kfp_ddp.models.bundle import LARGEST_MODEL, ONNX, Bundle
from kfp_ddp.models.champion import open_bundle
from kfp_ddp.models.interface import Interface, read_interface, read_sample
from kfp_ddp.models.onnx_runtimes import Loaded, Logits, load
from kfp_ddp.predict import ranking, softmax, square

if TYPE_CHECKING:
    from kfp_ddp.models.signature import Signer


@dataclass(frozen=True)
class Ready:
    """A model that is ready to serve."""

    sealed: Bundle
    file: str
    interface: Interface
    loaded: Loaded
    thresholds: doubt.Thresholds


def ready(
    bundle: str,
    variant: str = "",
    threads: int = 0,
    signer: "Signer | None" = None,
    max_pixels: int | None = None,
) -> Ready:
    """Load and test a verified model of a bundle; raise InputError.

    `variant` is a further format, such as int8; `threads` is as of `onnx_runtimes.load`.
    Pictures of more pixels than `max_pixels`, or those of the training, are not decoded.
    """
    sealed = open_bundle(bundle, signer=signer)
    file = _file(sealed, variant)
    content = sealed.read(file, LARGEST_MODEL)
    if content is None:
        raise InputError(f"the bundle {sealed.uri} has no {file}, so no server can load it")
    loaded = load(content, threads)
    interface = read_interface(sealed)
    if max_pixels is not None:
        interface = interface._replace(reading=interface.reading._replace(max_pixels=max_pixels))
    takes = loaded.entry[1][1:]
    if takes != (3, interface.size, interface.size):
        raise sealed.damaged(
            f"{file} takes images {list(takes)}, not squares of {interface.size} pixels"
        )
    _test(sealed, loaded, exact=not variant)
    return Ready(sealed, file, interface, loaded, doubt.read(sealed))


def _file(sealed: Bundle, variant: str) -> str:
    """Return the file of a format of the model."""
    if not variant:
        return ONNX
    record = variants.read(sealed)
    files = {form.name: form.file for form in record.variants if form.name in variants.FILES}
    if variant not in files:
        why = variants.RETIRED.get(variant) or record.left_out.get(variant, "")
        because = f" ({why})" if why else ""
        raise InputError(
            f"the bundle {sealed.uri} has no variant {variant} to serve{because}: it has "
            f"{', '.join(files) or 'none'}"
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
            "try another version of it, and report both"
        )


Images = NDArray[np.uint8]
Floats = NDArray[np.float32]
BYTES = "BYTES"
"""Data type of the v2 protocol."""
_FROM_URL = str.maketrans("-_", "+/")
"""To the common alphabet of base64 from that for URLs."""
DECODERS = 2
"""Pictures that are decoded at the same time; a large one takes some 500 MB."""
_BATCHED = Histogram(
    "kfp_ddp_batch_images",
    "Images that were computed together",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
_INFO = Gauge(
    "kfp_ddp_served_bundle",
    "1 for the bundle that is served",
    ("name", "version", "file", "runtime"),
)


class Served(Model):  # type: ignore[misc]
    """A bundle's model for KServe's server."""

    def __init__(self, model: Ready, name: str, largest: int, waiting: int) -> None:
        super().__init__(name)
        self.version = model.sealed.version
        self.interface = model.interface
        self.thresholds = model.thresholds
        self.entry = model.loaded.entry
        self.output = model.loaded.output
        self.batches = Batches(model.loaded, largest, waiting, _BATCHED.observe)
        self.decoders = ThreadPoolExecutor(DECODERS, "decode")
        self.decoding = 0
        self.waiting = waiting
        self.ready = True
        _INFO.labels(name, self.version, model.file, model.loaded.runtime).set(1)

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return the model's inputs; -1 is any size."""
        return [{"name": self.entry[0], "datatype": "UINT8", "shape": list(self.entry[1])}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return the model's outputs."""
        return [{"name": self.output[0], "datatype": "FP32", "shape": list(self.output[1])}]

    async def predict(
        self, payload: Any, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Answer a request of the v2 protocol."""
        if not isinstance(payload, InferRequest):
            raise InvalidInput(f"only v2 is spoken here: POST /v2/models/{self.name}/infer")
        images = await self._images(payload.inputs)
        name = self.output[0]
        for requested in payload.request_outputs or ():
            if requested.name != name:
                raise InvalidInput(f"there is no output {requested.name!r}: there is {name!r}")
        logits = await self.batches(images)
        output = InferOutput(name, list(logits.shape), "FP32")
        output.set_data_from_numpy(logits, binary_data=payload.use_binary_outputs)
        return InferResponse(
            payload.id or str(uuid.uuid4()),
            self.name,
            [output],
            model_version=self.version,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )

    async def classify(self, picture: bytes) -> dict[str, Any]:
        """Return the classes of a picture, the likeliest first, and if it is sure, for JSON."""
        logits = await self.batches(await self._decoded([picture]))
        (row,) = softmax(logits)
        (sure,) = self.thresholds.sure(logits)
        return {"sure": sure, "classes": ranking(self.interface.classes, row)}

    async def _decoded(self, pictures: list[bytes]) -> Images:
        """Decode pictures in another thread, so that other requests are answered meanwhile."""
        if self.decoding and self.decoding + len(pictures) > self.waiting:
            raise BusyError(f"{self.decoding} pictures wait already: retry later")
        run = asyncio.get_running_loop().run_in_executor
        self.decoding += len(pictures)
        try:
            squares = [
                await run(self.decoders, square, picture, self.interface) for picture in pictures
            ]
            return np.stack(squares)
        finally:
            self.decoding -= len(pictures)

    async def _images(self, inputs: list[InferInput]) -> Images:
        """Return the images of a request; raise InvalidInput."""
        name, shape = self.entry
        expected = f"one input {name!r}, UINT8 {['batch', *shape[1:]]}".replace("'", '"')
        given = [(tensor.name, tensor.datatype) for tensor in inputs]
        if given not in ([(name, "UINT8")], [(name, BYTES)]):
            actual = ", ".join(f"{tensor!r} {datatype}" for tensor, datatype in given) or "none"
            raise InvalidInput(f"give {expected}, or BYTES of picture files, not {actual[:200]}")
        (entry,) = inputs
        try:
            if entry.datatype == BYTES:
                return await self._decoded(_files(entry))
            data = entry.data  # empty with binary data
            if data and np.array(data).dtype.kind not in "iu":
                raise ValueError("the data are no whole numbers")
            images: Images = entry.as_numpy()
        except InputError as error:
            raise InvalidInput(str(error)) from None
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise InvalidInput(f"give {expected} with as many bytes: {str(error)[:200]}") from None
        if images.shape[1:] != shape[1:] or not images.size:
            raise InvalidInput(f"give {expected}, not {list(images.shape)}")
        return np.ascontiguousarray(images)


def _files(entry: InferInput) -> list[bytes]:
    """Return picture files: base64 of any form over HTTP, themselves over gRPC; InputError."""
    try:
        parts = [
            part if isinstance(part, bytes) else _from_base64(part)
            for part in entry.as_numpy().ravel().tolist()
        ]
    except (ValueError, TypeError, InvalidInput) as error:
        raise InputError(
            f"give BYTES as picture files in base64, one text for each: {one_line(error)}"
        ) from None
    if not parts:
        raise InputError("BYTES has no picture: give at least one file in base64")
    return parts


def _from_base64(text: str) -> bytes:
    plain = "".join(re.sub(r"^\s*data:[^,]*,", "", text).split()).rstrip("=").translate(_FROM_URL)
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


class BusyError(ServerNotReady):  # type: ignore[misc]
    """HTTP 503, or UNAVAILABLE, for which KServe's gRPC server asks for a `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Closed(ModelRepositoryExtension):  # type: ignore[misc]
    """A repository whose one model stays loaded; by default any client could unload it."""

    async def load(self, model_name: str) -> NoReturn:
        """HTTP 501."""
        raise NotImplementedError("the served model cannot be reloaded: restart the server")

    async def unload(self, model_name: str) -> NoReturn:
        """HTTP 501."""
        raise NotImplementedError("the served model cannot be unloaded: stop the server")


class Batches:
    """Batches queued images whenever the model is free, and collects the next ones meanwhile."""

    def __init__(
        self, model: Logits, largest: int, waiting: int, observe: Callable[[int], None]
    ) -> None:
        """Call `model` in one thread with at most `largest` images; an empty queue accepts any."""
        self._model = model
        self._largest = largest
        self._limit = waiting
        self._observe = observe
        self._thread = ThreadPoolExecutor(1, "model")
        self._queue: deque[tuple[Images, asyncio.Future[Floats]]] = deque()
        self._waiting = 0
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, images: Images) -> Floats:
        """Return the logits of images; raise BusyError if the queue is full."""
        if self._waiting and self._waiting + len(images) > self._limit:
            raise BusyError(f"{self._waiting} images wait already: retry later")
        loop = asyncio.get_running_loop()
        starts = range(0, len(images), self._largest)
        parts = [images[start : start + self._largest] for start in starts]
        futures = [loop.create_future() for _ in parts]
        self._queue.extend(zip(parts, futures, strict=True))
        self._waiting += len(images)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return np.concatenate(await asyncio.gather(*futures))

    async def _work(self) -> None:
        """Compute until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next()
            try:
                images = np.concatenate([part for part, _ in batch])
                self._observe(len(images))
                result = await loop.run_in_executor(self._thread, self._model, images)
                answers = np.split(result, np.cumsum([len(part) for part, _ in batch])[:-1])
            except Exception as error:  # noqa: BLE001  each client gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # the client may have disconnected
                    future.set_result(answer)

    def _next(self) -> list[tuple[Images, asyncio.Future[Floats]]]:
        """Return the next batch, in the order of arrival."""
        batch = [self._queue.popleft()]
        count = len(batch[0][0])
        while self._queue and count + len(self._queue[0][0]) <= self._largest:
            batch.append(self._queue.popleft())
            count += len(batch[-1][0])
        self._waiting -= count
        return batch
