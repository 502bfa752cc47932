"""A rank's life: read the flags, join the others, check the data, train, say how it ended."""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.training.config import TrainConfig, parse
from kfp_ddp.training.errors import InputError
from kfp_ddp.training.watch import Parent

if TYPE_CHECKING:
    from kfp_ddp.training.data import Index
    from kfp_ddp.training.distributed import World

USAGE, PREEMPTED = 2, 143
"""Exit codes: input that cannot be used; stopped as asked, with a checkpoint to go on from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; its exit code is 0, 2 for bad input, 143 when preempted; others raise."""
    parent = Parent()
    try:
        config = parse(argv, prog="python -m kfp_ddp.training")
        return 0 if run(config, parent) else PREEMPTED
    except InputError as error:
        _record(error)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE
    except Exception as error:
        _record(error)
        raise


def run(config: TrainConfig, parent: Parent | None = None) -> bool:
    """Train as `config` says; False when preempted.

    Raises:
        InputError: the configuration, the data or the output folder cannot be used.
    """
    from kfp_ddp.training import distributed
    from kfp_ddp.training.trainer import Trainer

    world = distributed.start(config)
    try:
        training, validation = world.from_first(lambda: _scan(config))
        config = world.from_first(lambda: _resolve(config, world, len(training)))
        _verify(config, world, training, validation)
        trainer = Trainer(config, world, training, validation)
        trainer.stop.on_signals()
        if parent is not None:
            parent.on_gone = lambda: trainer.stop.ask("the launcher is gone")
        return trainer.fit()
    finally:
        distributed.finish()


def _scan(config: TrainConfig) -> "tuple[Index, Index]":
    """Both splits, after a try to write to the output folder."""
    from kfp_ddp.training import data

    output = Path(config.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / ".writable").touch()
        (output / ".writable").unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to output_dir={output}: {error.strerror}; "
            "give the run a folder that its user may write"
        ) from None
    training = data.scan(Path(config.data) / "train")
    return training, data.scan(Path(config.data) / "val", training.classes)


def _resolve(config: TrainConfig, world: "World", samples: int) -> TrainConfig:
    """The configuration with its automatic values filled in, written to config.json.

    Raises:
        InputError: the batch cannot be dealt to the ranks, or there are too few images for it.
    """
    import torch

    batch, micro, ranks = config.batch_size, config.micro_batch_size, world.size
    if samples < ranks:
        raise InputError(
            f"{ranks} ranks but only {samples} training images: use at most {samples} ranks"
        )
    if samples < batch:
        raise InputError(f"batch_size={batch} but only {samples} training images: lower batch_size")
    unit = ranks * (micro or 1)
    if batch % unit:
        what = f"micro_batch_size={micro} x {ranks} ranks" if micro else f"{ranks} ranks"
        near = max(unit, round(batch / unit) * unit)
        raise InputError(
            f"batch_size={batch} cannot be dealt to {what} evenly: "
            f"use a multiple of {unit}, for example {near}"
        )
    precision = config.precision
    if precision == "auto":
        bf16 = world.device.type == "cuda" and torch.cuda.is_bf16_supported()
        precision = "bf16" if bf16 else "fp32"
    resolved = config.model_copy(
        update={"micro_batch_size": micro or batch // ranks, "precision": precision}
    )
    (Path(config.output_dir) / "config.json").write_text(resolved.to_json() + "\n")
    return resolved


def _verify(config: TrainConfig, world: "World", training: "Index", validation: "Index") -> None:
    """Decode images of both splits on all ranks; raise the first error of any rank on all."""
    from kfp_ddp.training import data

    found: list[data.Findings] = []
    problem = ""
    try:
        found = [
            data.verify(split, config, world.rank, world.size) for split in (training, validation)
        ]
    except InputError as error:
        problem = str(error)
    for line in world.gather(problem):
        if line:
            raise InputError(line)
    findings = [item for items in world.gather(found) for item in items]
    unusual = [item.first_unusual for item in findings if item.first_unusual]
    if unusual and world.first:
        print(
            f"warning: of {sum(item.checked for item in findings)} images checked, "
            f"{sum(item.not_rgb for item in findings)} are not RGB and "
            f"{sum(item.not_square for item in findings)} not square (first {unusual[0]}); "
            "they are converted and resized, images=strict refuses them",
            file=sys.stderr,
            flush=True,
        )


def _record(error: Exception) -> None:
    """Tell the launcher what ended this rank, in the form that torch elastic reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    known = isinstance(error, InputError)
    record = {
        "message": {
            "message": line if known else f"{type(error).__name__}: {line}",
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(now))},
        },
        "exact_time": now,
        "consequence": not known and _lost_a_peer(error),
    }
    Path(path).write_text(json.dumps(record))


def _lost_a_peer(error: Exception) -> bool:
    """Whether this error only says that another rank went away."""
    words = ("connection closed", "connection reset", "connection refused", "broken pipe", "nccl")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
