"""Atomic checkpoints: written to a temporary folder, verified by digest, renamed into place."""

import contextlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, StorageError
from kfp_ddp.core.files import durable, fsync, sha256, sha256_of_json
from kfp_ddp.core.log import log
from kfp_ddp.core.text import one_line
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.training.model import networks
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import (
    DIGEST,
    MANIFEST,
    STATE,
    Manifest,
    read_manifest,
    step_dir,
    step_dirs,
    step_of,
)
from kfp_ddp.training.state.weight_files import load

_PAUSES_S = (0.5, 2.0)
_DAMAGE = (
    *(FileNotFoundError, NotADirectoryError),
    *(ValueError, LookupError, TypeError, AttributeError),
)

T = TypeVar("T")


class UnreadableError(StorageError):
    """The volume failed to read a checkpoint, which may be valid: it must not be replaced."""

    retryable: ClassVar[bool] = True


@dataclass(frozen=True)
class Checkpoint(Manifest):
    """A verified step directory."""

    def state(self) -> dict[str, Any]:
        """Load the saved state; see `load`."""
        state: dict[str, Any] = load(self.path / STATE)
        return state


@dataclass(frozen=True)
class ModelInfo:
    """Description of a trained model, without its weights."""

    model: str
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    step: int
    config: dict[str, Any]

    @property
    def blur_pool(self) -> bool:
        """Whether the network has low-pass filters before its strides."""
        return bool(self.config.get("blur_pool"))

    @property
    def model_code(self) -> str:
        """The packed file of a user's own network; '' for one that is known by name."""
        return str(self.config.get("model_code", ""))

    @property
    def reading(self) -> Reading:
        """How the run read images; runs of earlier versions dropped alpha channels."""
        # Images that the training refused (images=strict) are converted.
        names = {*Reading._fields} - {"images", "crop"}
        fields = {name: self.config[name] for name in names & self.config.keys()}
        return Reading(**fields, crop=timm_networks.preprocessing(self.model).crop)

    @property
    def test_time_flip(self) -> bool:
        """Whether its logits are averaged over an image and its mirror image."""
        return bool(self.config.get("test_time_flip"))

    def network(self) -> nn.Module:
        """Build the network without its weights; runs the file of a user's own network."""
        return networks.build(
            self.model, len(self.classes), self.blur_pool, self.image_size, self.model_code
        )


def check_shapes(
    info: ModelInfo, state: Mapping[str, Tensor], where: str, advice: str = networks.ADVICE
) -> None:
    """Refuse weights of other shapes than the network has, before memory is used for it.

    A network of its own code is not checked, as only its code knows the shapes.
    """
    if info.model_code:
        return
    with networks.without_memory():
        network = info.network()
    with torch.device("meta"):
        shapes = {name: value.to("meta") for name, value in state.items()}
        networks.fit(network.to("meta"), shapes, where, info.model, advice)


def verify(path: Path) -> Checkpoint:
    """Check size and sha256 of a step directory's state; raise InputError or UnreadableError."""

    def check() -> Checkpoint:
        manifest = read_manifest(path)
        state = path / STATE
        about = state.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{STATE} is not a file")
        if about.st_size != manifest.fields["files"][STATE]["size"]:
            raise InputError(f"{state} is truncated: use an older checkpoint")
        if sha256(state) != manifest.digest:
            raise InputError(f"{state} was altered: use an older checkpoint")
        return Checkpoint(path, manifest.step, manifest.digest, manifest.fields)

    return _read(path, check)


def newest_valid(directory: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint of a `checkpoints` folder; raise UnreadableError."""
    for path in steps(directory):
        with contextlib.suppress(InputError):
            return verify(path)
    return None


def steps(directory: Path) -> list[Path]:
    """List step directories, newest first, valid or not; raise UnreadableError."""
    return _read(directory, lambda: step_dirs(directory))


def _read(path: Path, what: Callable[[], T]) -> T:
    """Return `what()`, with retries: a network file system fails now and then."""
    for pause in (*_PAUSES_S, None):
        try:
            return what()
        except InputError:
            raise
        except _DAMAGE as error:
            raise InputError(f"{path} is not a complete checkpoint: {error}") from None
        except OSError as error:
            if pause is None:
                raise UnreadableError(
                    f"cannot read {path}: {error.strerror}; it was not changed: "
                    "repair the volume and start again to resume"
                ) from None
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def load_model(path: Path | str) -> tuple[nn.Module, ModelInfo]:
    """Load a model: float32, CPU, eval mode, with averaged weights if saved; raise as `verify`."""
    checkpoint = verify(Path(path))
    manifest = checkpoint.fields
    state = checkpoint.state()
    try:
        info = ModelInfo(
            model=str(manifest["model"]),
            classes=tuple(manifest["classes"]),
            image_size=manifest["image_size"],
            mean=tuple(manifest["mean"]),
            std=tuple(manifest["std"]),
            step=checkpoint.step,
            config=dict(manifest["config"]),
        )
        weights = dict(state["ema"] or state["model"])
    except _DAMAGE as error:
        raise InputError(f"{path} is not a complete checkpoint: {one_line(error)}") from None
    check_shapes(info, weights, str(path))
    network = info.network()
    networks.fill(network, weights, str(path), info.model)
    return network.float().eval(), info


class Writer:
    """Saves in the background; the next `save` or `wait` raises the error of a save."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep
        self._buffers: dict[str, Tensor] = {}
        self._later: list[tuple[Tensor, Tensor]] = []
        self.copied = threading.Event()
        """Set when the state on the CPU that is being saved is copied completely."""
        self.copied.set()
        self._side: torch.cuda.Stream | None = None
        self._queued: torch.cuda.Event | None = None
        """The end of the copies from a GPU."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        manifest: Mapping[str, Any],
        keep_also: Collection[int] = (),
        volatile: Collection[Tensor] | None = None,
    ) -> None:
        """Start to save `state`; raise the error before. Keep the newest and `keep_also`.

        With `volatile`, do not change other tensors before `wait_for_copies`.
        """
        self.wait()  # the buffers are free then
        soon = None if volatile is None else {tensor.data_ptr() for tensor in volatile}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            copy = self._snapshot(state, "", soon)
            side.wait_stream(current)
            self._queued = side.record_event()
        else:
            copy = self._snapshot(state, "", soon)
        self.copied.clear()
        # Not a daemon: the interpreter does not exit before a save is durable.
        self._thread = threading.Thread(
            target=self._write, args=(step, copy, dict(manifest), keep_also), name="checkpoint"
        )
        self._thread.start()

    @property
    def copying(self) -> bool:
        """Whether `wait_for_copies` has to wait."""
        done: bool = self._queued is None or self._queued.query()  # type: ignore[no-untyped-call]
        return not (done and self.copied.is_set())

    def wait_for_copies(self) -> None:
        """Wait until the state is copied and may change; for a GPU its stream waits, not we."""
        if self._queued is not None:
            torch.cuda.current_stream().wait_event(self._queued)
        self.copied.wait()

    def wait(self) -> None:
        """Wait until the last save is durable; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            if isinstance(error, KfpDdpError):
                raise error
            try:
                last = newest_valid(self.directory)
                remaining = f"step {last.step} is the newest" if last else "none was saved before"
            except UnreadableError:
                remaining = "those saved before cannot be read now"
            raise StorageError(
                f"cannot save a checkpoint in {self.directory}: {_reason(error)}; {remaining}; "
                "make room or repair the volume and start again to resume"
            ) from error

    def _snapshot(self, value: Any, name: str, soon: Collection[int] | None) -> Any:
        """Copy into reused buffers; what is not in `soon` later on a CPU, and on a GPU beside."""
        if isinstance(value, Tensor):
            buffer = self._buffer(name, value)
            waits = soon is not None and value.data_ptr() not in soon
            if waits and value.device.type == "cpu":
                self._later.append((buffer, value.detach()))
                return buffer
            beside = torch.cuda.stream(self._side) if waits and value.is_cuda else None
            with beside or contextlib.nullcontext():
                return buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        if isinstance(value, Mapping):
            return {key: self._snapshot(item, f"{name}/{key}", soon) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._snapshot(item, f"{name}/{i}", soon) for i, item in enumerate(value)]
        return value

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        """Return the buffer of the last save if it fits: to allocate takes longer than to copy."""
        buffer = self._buffers.get(name)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            return buffer
        buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        self._buffers[name] = buffer
        return buffer

    def _write(
        self, step: int, state: dict[str, Any], manifest: dict[str, Any], keep_also: Collection[int]
    ) -> None:
        try:
            self._fill_later()
            if self._queued is not None:
                self._queued.synchronize()
            for part in ("model", "ema"):
                if name := networks.not_finite(state.get(part) or {}):  # no run could resume
                    raise JobError(
                        f"after step {step} {name} is NaN or infinite, so it was not saved: "
                        "lower learning_rate or lengthen warmup_epochs and start again to resume "
                        "from the checkpoint before"
                    )
            write(self.directory, step, state, manifest)
            self._delete_older(keep_also)
        except Exception as error:  # noqa: BLE001  raised again by wait()
            self._error = error

    def _delete_older(self, keep_also: Collection[int]) -> None:
        for path in steps(self.directory)[self.keep :]:
            if step_of(path) in keep_also:
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:  # a reader has it open: the next save tries again
                log.warning(f"{path} cannot be deleted ({error.strerror})")

    def _fill_later(self) -> None:
        try:
            for buffer, source in self._later:
                buffer.copy_(source)
        finally:
            self._later.clear()
            self.copied.set()


def _reason(error: BaseException) -> str:
    """Return the cause: torch's zip writer raises another error while it handles an OSError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error)


def write(directory: Path, step: int, state: dict[str, Any], manifest: dict[str, Any]) -> Path:
    """Write a checkpoint to a temporary folder, sync, rename; raise OSError or RuntimeError."""
    final = step_dir(directory, step)
    aside = directory / f".{final.name}.tmp"
    if not directory.is_dir():
        directory.mkdir(parents=True)
        fsync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        with durable(aside / STATE) as file:
            torch.save(state, file)
        about = {"sha256": sha256(aside / STATE), "size": (aside / STATE).stat().st_size}
        fields = json.loads(json.dumps({"step": step, **manifest, "files": {STATE: about}}))
        with durable(aside / MANIFEST) as file:
            file.write(json.dumps({**fields, DIGEST: sha256_of_json(fields)}, indent=1).encode())
        fsync(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # free the space on a full volume
        raise
    if final.exists():  # the same step again, after a resume from an older one
        old = directory / f".{final.name}.old.tmp"
        os.replace(final, old)
        os.replace(aside, final)
        shutil.rmtree(old)
    else:
        os.replace(aside, final)
    fsync(directory)
    return final


def set_aside(directory: Path, newest: Checkpoint | None) -> list[Path]:
    """Rename the invalid step directories newer than `newest`, which would count as checkpoints."""
    least = newest.step if newest else -1
    invalid = [path for path in steps(directory) if step_of(path) > least]
    for path in invalid:
        target = path.with_name(f"corrupt-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(path, target)
    for leftover in directory.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    return invalid


def manifest_of(config: TrainConfig, classes: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Return the fields of a manifest other than its step and files."""
    mean, std, _ = timm_networks.preprocessing(config.model)
    return {
        **more,
        "config": config.model_dump(),
        "classes": list(classes),
        "model": config.model,
        "image_size": config.image_size,
        "mean": list(mean),
        "std": list(std),
    }
