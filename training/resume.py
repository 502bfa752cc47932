"""Choice of the checkpoint that a run resumes from."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training import checkpoint, model_file
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.optim import has_separate_body
from kfp_ddp.training.splits import Index
from kfp_ddp.training.strategies import FORMS, form_of


def choose(
    directory: Path, config: TrainConfig, training: Index, form: str, digest: str = ""
) -> Path | None:
    """Return the checkpoint to resume from, or None; invalid checkpoints are set aside.

    With resume=never, `begin` has moved earlier ones away.

    Args:
        directory: The run's `checkpoints` folder.
        config: The current configuration.
        training: The current training images.
        form: Form of the state that the current strategy reads, a key of `FORMS`.
        digest: Digest of the training images.

    Raises:
        InputError: it belongs to another model, other classes or another order of the data.
        StorageError: none of the checkpoints is valid, or the volume fails.
    """
    newest = checkpoint.newest_valid(directory)
    if newest is None and (invalid := checkpoint.steps(directory)):
        raise StorageError(
            f"none of the {len(invalid)} checkpoints in {directory} is valid: "
            "copy a complete one there, or set resume=never to start from scratch"
        )
    for path in checkpoint.set_aside(directory, newest):
        print(f"warning: {path} is invalid and was set aside", flush=True)
    if newest is None:
        return None
    before = newest.manifest
    for name, now, then in (
        ("model", config.model, before["model"]),
        ("the digest of the model's file", *_codes(config, before["config"])),
        ("blur_pool", config.blur_pool, before["config"]["blur_pool"]),
        ("the number of classes", len(training.classes), len(before["classes"])),
        *_classes(training.classes, before["classes"]),
        ("image_size", config.image_size, before["image_size"]),
        ("batch_size", config.batch_size, before["config"]["batch_size"]),
        ("seed", config.seed, before["config"]["seed"]),
        ("optimizer", config.optimizer, before["config"].get("optimizer", "sgd")),
        _groups(config, before["config"]),
        *_buffers(config, training, before["config"]),
        ("strategy", FORMS[form], FORMS.get(form_of(before))),
        ("the number of training images", len(training), before["samples"]),
        ("the digest of paths and sizes of the training images", *_digests(digest, before)),
    ):
        if now != then:
            raise InputError(
                f"cannot resume from {newest.path}: {name} was {then} and is now {now}; "
                "use another output_dir, or resume=never to start from scratch"
            )
    return newest.path


def _classes(now: Sequence[str], before: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the first class of another name: all of them would not fit in a line."""
    pairs = enumerate(zip(now, before, strict=False))
    return [(f"class {i}", repr(new), repr(old)) for i, (new, old) in pairs if new != old][:1]


def _codes(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    codes = (config.model_code, before.get("model_code", ""))
    return [model_file.digest(code)[:12] for code in codes]


def _buffers(
    config: TrainConfig, training: Index, before: Mapping[str, Any]
) -> list[tuple[str, float, float]]:
    """Return the settings that the order of images in archives depends on."""
    if training.slices is None or "shuffle_buffer_mb" not in before:
        return []
    return [("shuffle_buffer_mb", config.shuffle_buffer_mb, before["shuffle_buffer_mb"])]


def _groups(config: TrainConfig, before: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Compare the parameter groups of the optimizer."""
    name = "a separate classifier group (freeze_epochs, body_lr_factor)"
    then = before.get("freeze_epochs", 0), before.get("body_lr_factor", 1.0)
    now = config.freeze_epochs, config.body_lr_factor
    return name, has_separate_body(*now), has_separate_body(*then)


def _digests(now: str, before: Mapping[str, Any]) -> tuple[str, str]:
    """Return shortened digests; checkpoints of early versions have none."""
    then = before.get("images", "")
    return (now[:12], then[:12]) if now and then else ("", "")


def continues(config: TrainConfig, launches: Sequence[str]) -> bool:
    """Return whether a run with resume=never was started before: it must not lose its progress.

    A run is identified by its `run_id`; without one by the launchers of its ranks, which restart
    them when a node joins or leaves; under plain torchrun by its count of restarts.
    """
    if config.resume != "never":
        return False
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    try:
        starts = RunFolder(config.output_dir).begun_by.read_text().splitlines()
    except FileNotFoundError:
        return False
    return not _names(config, launches).isdisjoint(starts)


def begin(config: TrainConfig, launches: Sequence[str]) -> None:
    """With resume=never, move earlier checkpoints away, and record this start."""
    if config.resume != "never":
        return
    folder = RunFolder(config.output_dir)
    if checkpoint.steps(folder.checkpoints):
        names = (folder.path / f"{folder.checkpoints.name}.old-{i}" for i in itertools.count())
        folder.checkpoints.rename(next(name for name in names if not os.path.lexists(name)))
    folder.begun_by.write_text("\n".join(sorted(_names(config, launches))))


def _names(config: TrainConfig, launches: Sequence[str]) -> set[str]:
    return {config.run_id} if config.run_id else set(launches) - {""}


def earlier_config(config: TrainConfig) -> dict[str, Any] | None:
    """Return the configuration of the checkpoint to resume from, as JSON; None without one.

    Fields that are not set now keep their values from it.
    """
    if config.resume == "never":
        return None
    newest = checkpoint.newest_valid(RunFolder(config.output_dir).checkpoints)
    return None if newest is None else newest.manifest["config"]
