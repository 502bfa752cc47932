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
from kfp_ddp.training.data import Split
from kfp_ddp.training.learner import has_separate_body
from kfp_ddp.training.strategies import FORMS, form_of


def choose(directory: Path, config: TrainConfig, split: Split, form: str) -> Path | None:
    """Return the checkpoint to resume from, or None; invalid checkpoints are set aside.

    With resume=never, `begin` has moved earlier ones away. `form` is that of the state which the
    current strategy reads, a key of `FORMS`. Raises InputError if the checkpoint belongs to another
    model, other classes or another order of the data; StorageError if none is valid, or the volume
    fails.
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
    was, training = newest.manifest, split.index
    saved: Mapping[str, Any] = was["config"]
    pairs = {
        "model": (config.model, was["model"]),
        "the digest of the model's file": (
            model_file.digest(config.model_code)[:12],
            model_file.digest(saved.get("model_code", ""))[:12],
        ),
        "the number of classes": (len(training.classes), len(was["classes"])),
        "image_size": (config.image_size, was["image_size"]),
        **{
            name: (getattr(config, name), saved[name])
            for name in ("blur_pool", "batch_size", "seed")
        },
        "optimizer": (config.optimizer, saved.get("optimizer", "sgd")),
        "sampling": (config.sampling, saved.get("sampling", "uniform")),
        "a separate classifier group (freeze_epochs, body_lr_factor)": (
            has_separate_body(config.freeze_epochs, config.body_lr_factor),
            has_separate_body(saved.get("freeze_epochs", 0), saved.get("body_lr_factor", 1.0)),
        ),
        "strategy": (FORMS[form], FORMS.get(form_of(was))),
        "the number of training images": (len(training), was["samples"]),
    }
    for number, names in enumerate(zip(training.classes, was["classes"], strict=False)):
        pairs[f"class {number}"] = (repr(names[0]), repr(names[1]))
    if training.slices is not None and "shuffle_buffer_mb" in saved:  # the order depends on it
        pairs["shuffle_buffer_mb"] = (config.shuffle_buffer_mb, saved["shuffle_buffer_mb"])
    for field, now, what in (
        ("images", split.digest, "paths and sizes"),
        ("contents", split.contents, "contents"),
    ):
        if now and was.get(field):  # checkpoints of early versions have none
            pairs[f"the digest of {what} of the training images"] = (now[:12], was[field][:12])
    for name, (now, then) in pairs.items():
        if now != then:
            raise InputError(
                f"cannot resume from {newest.path}: {name} was {then} and is now {now}; "
                "use another output_dir, or resume=never to start from scratch"
            )
    return newest.path


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
