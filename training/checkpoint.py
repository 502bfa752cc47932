"""Checkpoints, whole or not there: written aside, verified by digest, renamed into place."""

import contextlib
import hashlib
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
from kfp_ddp.core.files import durable, fsync
from kfp_ddp.training import model as models
from kfp_ddp.training.config import MAX_PIXELS, TrainConfig
from kfp_ddp.training.manifest import (
    DIGEST,
    MANIFEST,
    STATE,
    digest_of,
    read_manifest,
    step_dir,
    step_dirs,
    step_of,
)

_PAUSES_S = (0.5, 2.0)
_DAMAGE = (
    *(FileNotFoundError, NotADirectoryError),
    *(ValueError, LookupError, TypeError, AttributeError),
)

T = TypeVar("T")


class UnreadableError(StorageError):
    """The volume did not give what was asked for: it may be whole, so nothing may replace it."""

    retryable: ClassVar[bool] = True


@dataclass(frozen=True)
class Checkpoint:
    """A verified step directory: `digest` is the sha256 of its state.pt."""

    path: Path
    step: int
    digest: str
    manifest: dict[str, Any]

    def state(self) -> dict[str, Any]:
        """The saved state on the CPU; no code in the file is run."""
        state: dict[str, Any] = torch.load(self.path / STATE, map_location="cpu", weights_only=True)
        return state


@dataclass(frozen=True)
class ModelInfo:
    """What a trained model needs beside its weights."""

    model: str
    classes: tuple[str, ...]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    step: int
    config: dict[str, Any]

    @property
    def blur_pool(self) -> bool:
        """Whether the network has filters before its strides."""
        return bool(self.config.get("blur_pool"))

    @property
    def model_code(self) -> str:
        """The packed file of a network of one's own; '' for one that is known by name."""
        return str(self.config.get("model_code", ""))

    @property
    def on_bad_image(self) -> str:
        """What the run did with an image that cannot be read: fail or skip."""
        return str(self.config.get("on_bad_image", "fail"))

    @property
    def max_pixels(self) -> int:
        """Above how many pixels an image could not be read in the run."""
        return int(self.config.get("max_pixels", MAX_PIXELS))

    @property
    def test_time_flip(self) -> bool:
        """Whether its logits are the mean of those of an image and its mirror image."""
        return bool(self.config.get("test_time_flip"))

    def network(self) -> nn.Module:
        """The network without its weights; the file of a network of one's own is run."""
        return models.build(
            self.model, len(self.classes), self.blur_pool, self.image_size, self.model_code
        )


def verify(path: Path) -> Checkpoint:
    """Read one step directory and check the state's size and sha256 against its manifest.

    Raises:
        InputError: no manifest, a missing, torn or altered file.
        UnreadableError: the volume fails in another way.
    """

    def check() -> Checkpoint:
        manifest, state = read_manifest(path), path / STATE
        about = state.stat()
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{STATE} is no file")
        if about.st_size != manifest.fields["files"][STATE]["size"]:
            raise InputError(f"{state} is torn: use an older checkpoint")
        if _sha256(state) != manifest.digest:
            raise InputError(f"{state} was altered: use an older checkpoint")
        return Checkpoint(path, manifest.step, manifest.digest, manifest.fields)

    return _read(path, check)


def newest_valid(directory: Path) -> Checkpoint | None:
    """The newest checkpoint in a `checkpoints` folder that verifies; None if there is none.

    Newest by step, not by a clock.

    Raises:
        UnreadableError: the volume fails before one is found.
    """
    for path in steps(directory):
        with contextlib.suppress(InputError):
            return verify(path)
    return None


def steps(directory: Path) -> list[Path]:
    """Step directories, newest first, verified or not; raises UnreadableError."""
    return _read(directory, lambda: step_dirs(directory))


def _read(path: Path, what: Callable[[], T]) -> T:
    """`what()`, tried again where the volume fails: a network file system hiccups."""
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
                    f"cannot read {path}: {error.strerror}; it was left as it is: "
                    "repair the volume and start again to resume"
                ) from None
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def load_model(path: Path) -> tuple[nn.Module, ModelInfo]:
    """The model of a step directory: float32 on the CPU, in eval mode, averaged weights if kept.

    Its input is normalised (`model.normalise`), its output are logits.

    Raises:
        InputError: the checkpoint does not verify.
        UnreadableError: the volume fails in another way.
    """
    checkpoint = verify(path)
    manifest = checkpoint.manifest
    info = ModelInfo(
        model=manifest["model"],
        classes=tuple(manifest["classes"]),
        image_size=manifest["image_size"],
        mean=tuple(manifest["mean"]),
        std=tuple(manifest["std"]),
        step=checkpoint.step,
        config=manifest["config"],
    )
    network, state = info.network(), checkpoint.state()
    models.fill(network, state["ema"] or state["model"], str(path), info.model)
    return network.float().eval(), info


class Writer:
    """Saves in the background: the caller waits for a copy into buffers that are kept, at most.

    An error of a save is raised by the next `save` or `wait`, as a KfpDdpError.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep
        self._buffers: dict[str, Tensor] = {}
        self._from_gpu = False
        self._later: list[tuple[Tensor, Tensor]] = []
        self.copied = threading.Event()
        """Whether all of the state that is being saved is copied, and may change."""
        self.copied.set()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        manifest: Mapping[str, Any],
        spared: Collection[int] = (),
        volatile: Collection[Tensor] | None = None,
    ) -> None:
        """Begin to save `state` as `step-<step>`; `manifest` gets its step and files added.

        Of older checkpoints the newest stay, and those of the steps `spared`. Where `volatile` is
        given, what else is on the CPU is copied in the background, and must not change before
        `copied` is set.

        Raises:
            StorageError: the save before this one failed.
            JobError: it held weights that are no numbers.
        """
        self.wait()
        soon = None if volatile is None else {tensor.data_ptr() for tensor in volatile}
        copy = self._snapshot(state, "", soon)
        if self._from_gpu:
            torch.cuda.synchronize()  # the copies were only queued
        self.copied.clear()
        # Not a daemon: the interpreter does not end before a begun save is durable.
        self._thread = threading.Thread(
            target=self._write, args=(step, copy, dict(manifest), spared), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the save that was begun last is durable; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, KfpDdpError):
                raise error
            try:
                last = newest_valid(self.directory)
                kept = f"step {last.step} is kept" if last else "none was saved before"
            except UnreadableError:
                kept = "those saved before cannot be read now"
            raise StorageError(
                f"cannot save a checkpoint in {self.directory}: {_reason(error)}; {kept}; "
                "make room or repair the volume and start again to resume"
            ) from error

    def _snapshot(self, value: Any, name: str, soon: Collection[int] | None) -> Any:
        """A copy in buffers that are kept; on the CPU those not at `soon` are filled later."""
        if isinstance(value, Tensor):
            self._from_gpu |= value.is_cuda
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                self._buffers[name] = buffer
            if soon is not None and value.device.type == "cpu" and value.data_ptr() not in soon:
                self._later.append((buffer, value.detach()))
                return buffer
            return buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        if isinstance(value, Mapping):
            return {key: self._snapshot(item, f"{name}/{key}", soon) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._snapshot(item, f"{name}/{i}", soon) for i, item in enumerate(value)]
        return value

    def _write(
        self,
        step: int,
        state: dict[str, Any],
        manifest: dict[str, Any],
        spared: Collection[int],
    ) -> None:
        try:
            self._fill_later()
            _refuse_not_finite(step, state)
            write(self.directory, step, state, manifest)
            for old in steps(self.directory)[self.keep :]:
                if step_of(old) not in spared:
                    shutil.rmtree(old)
        except Exception as error:  # noqa: BLE001  raised again by wait()
            self._error = error

    def _fill_later(self) -> None:
        try:
            for buffer, source in self._later:
                buffer.copy_(source)
        finally:
            self._later.clear()
            self.copied.set()


def _refuse_not_finite(step: int, state: Mapping[str, Any]) -> None:
    """Raise JobError for weights or averages that no run could go on from."""
    for part in ("model", "ema"):
        for name, value in (state.get(part) or {}).items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise JobError(
                    f"after step {step} {name} is NaN or infinite, so no checkpoint was kept: "
                    "lower learning_rate or lengthen warmup_epochs and start again to resume "
                    "from the one before"
                )


def _reason(error: BaseException) -> str:
    """What the disk said: torch's zip writer fails anew while it closes over an OSError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error)


def write(directory: Path, step: int, state: dict[str, Any], manifest: dict[str, Any]) -> Path:
    """Write one checkpoint durably and return its folder; raises OSError or RuntimeError.

    Aside first, synced to disk, then renamed: a reader never sees half of one.
    """
    final = step_dir(directory, step)
    aside = directory / f".{final.name}.tmp"
    if not directory.is_dir():
        directory.mkdir(parents=True)
        fsync(directory.parent)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        _fill(aside, state, {"step": step, **manifest})
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # what it took of a full volume is needed
        raise
    if final.exists():  # the same step again, after a fall back to an older one
        old = directory / f".{final.name}.old.tmp"
        os.replace(final, old)
        os.replace(aside, final)
        shutil.rmtree(old)
    else:
        os.replace(aside, final)
    fsync(directory)
    return final


def _fill(aside: Path, state: dict[str, Any], manifest: dict[str, Any]) -> None:
    with durable(aside / STATE) as file:
        torch.save(state, file)
    files = {STATE: {"sha256": _sha256(aside / STATE), "size": (aside / STATE).stat().st_size}}
    fields = json.loads(json.dumps({**manifest, "files": files}))
    with durable(aside / MANIFEST) as file:
        file.write(json.dumps({**fields, DIGEST: digest_of(fields)}, indent=1).encode())
    fsync(aside)


def set_aside(directory: Path, newest: Checkpoint | None) -> list[Path]:
    """Rename step directories that are newer than `newest`, none of which verifies, and clean up.

    Otherwise they would count among the checkpoints to keep. Returns them.
    """
    least = newest.step if newest else -1
    shunned = [path for path in steps(directory) if step_of(path) > least]
    for path in shunned:
        target = path.with_name(f"corrupt-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(path, target)
    for left in directory.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    return shunned


def manifest_of(config: TrainConfig, classes: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """What a manifest says beside its step and files."""
    return {
        **more,
        "config": config.model_dump(),
        "classes": list(classes),
        "model": config.model,
        "image_size": config.image_size,
        "mean": list(models.MEAN),
        "std": list(models.STD),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
