"""What a run goes on from: a checkpoint of its own."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.training import checkpoint, model_file
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.optim import body_is_apart
from kfp_ddp.training.splits import Index
from kfp_ddp.training.strategies import FORMS, form_of


def choose(
    directory: Path, config: TrainConfig, training: Index, form: str, digest: str = ""
) -> Path | None:
    """The checkpoint to go on from; None to begin. One that does not verify is set aside.

    Under resume=never, `begin` has moved earlier ones away. `config`, `training`, `digest`, that of
    the training images, and `form`, the strategy's, are as they are now.

    Raises:
        InputError: it belongs to another model, other classes or another order of the data.
        StorageError: there are some and none verifies, or the volume does not let them be read.
    """
    found = checkpoint.newest_valid(directory)
    if found is None and (there := checkpoint.steps(directory)):
        raise StorageError(
            f"none of the {len(there)} checkpoints in {directory} verifies: "
            "copy a whole one there, or set resume=never to begin anew"
        )
    for path in checkpoint.set_aside(directory, found):
        print(f"warning: {path} does not verify and was set aside", flush=True)
    if found is None:
        return None
    before = found.manifest
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
                f"cannot resume from {found.path}: {name} was {then} and is now {now}; "
                "use another output_dir, or resume=never to begin anew"
            )
    return found.path


def _classes(now: Sequence[str], before: Sequence[str]) -> list[tuple[str, str, str]]:
    """The first class of another name: all of them would not fit in a line."""
    pairs = enumerate(zip(now, before, strict=False))
    return [(f"class {i}", repr(new), repr(old)) for i, (new, old) in pairs if new != old][:1]


def _codes(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    codes = (config.model_code, before.get("model_code", ""))
    return [model_file.digest(code)[:12] for code in codes]


def _buffers(
    config: TrainConfig, training: Index, before: Mapping[str, Any]
) -> list[tuple[str, float, float]]:
    """What the order of images in archives depends on."""
    if training.slices is None or "shuffle_buffer_mb" not in before:
        return []
    return [("shuffle_buffer_mb", config.shuffle_buffer_mb, before["shuffle_buffer_mb"])]


def _groups(config: TrainConfig, before: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """What of the optimizer's state has which place."""
    name = "whether the classifier learns apart (freeze_epochs, body_lr_factor)"
    then = before.get("freeze_epochs", 0), before.get("body_lr_factor", 1.0)
    now = config.freeze_epochs, config.body_lr_factor
    return name, body_is_apart(*now), body_is_apart(*then)


def _digests(now: str, before: Mapping[str, Any]) -> tuple[str, str]:
    """Shortened; earlier versions told none."""
    then = before.get("images", "")
    return (now[:12], then[:12]) if now and then else ("", "")


def goes_on(config: TrainConfig, launches: Sequence[str]) -> bool:
    """Whether a run with resume=never was begun before: it must not discard its own progress.

    A run is known by its `run_id`; without one by the launchers of its ranks, which start them
    again when a node comes or goes; under plain torchrun by its count of restarts.
    """
    if config.resume != "never":
        return False
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    try:
        begun = RunFolder(config.output_dir).begun_by.read_text().splitlines()
    except FileNotFoundError:
        return False
    return not _names(config, launches).isdisjoint(begun)


def begin(config: TrainConfig, launches: Sequence[str]) -> None:
    """Under resume=never, keep earlier checkpoints where no run looks for them, and note it."""
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
    """The configuration of the checkpoint to go on from, as JSON has it; None if there is none.

    What nobody set stays as it was then.
    """
    if config.resume == "never":
        return None
    found = checkpoint.newest_valid(RunFolder(config.output_dir).checkpoints)
    return None if found is None else found.manifest["config"]
