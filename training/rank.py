"""A rank's life: read the flags, join the others, check the data, train, say how it ended."""

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_ddp.base.errors import FULL, InputError, full
from kfp_ddp.training.config import TrainConfig, parse
from kfp_ddp.training.watch import LAUNCH, Heartbeat, Parent, end_for_good

if TYPE_CHECKING:
    from kfp_ddp.training.cache import Cache
    from kfp_ddp.training.data import Index
    from kfp_ddp.training.distributed import World
    from kfp_ddp.training.images import Findings

USAGE, PREEMPTED = 2, 143
"""Exit codes: input that cannot be used; stopped as asked, with a checkpoint to go on from."""
STALE = "the heartbeat is stale"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; its exit code is 0, 2 for bad input, 143 when preempted; others raise."""
    parent = Parent()
    try:
        config = parse(argv, prog="python -m kfp_ddp.training")
        return 0 if run(config, parent) else PREEMPTED
    except InputError as error:
        return _refuse(error)
    except OSError as error:
        if error.errno in FULL:
            return _refuse(InputError(full(error, config.output_dir)))
        _record(error)
        raise
    except Exception as error:
        _record(error)
        raise


def _refuse(error: InputError) -> int:
    _record(error)
    with contextlib.suppress(OSError):  # the log may lie on the volume that is full
        print(f"error: {error}", file=sys.stderr, flush=True)
    if not error.retryable:
        end_for_good()
    return USAGE


def run(config: TrainConfig, parent: Parent | None = None) -> bool:
    """Train as `config` says; False when preempted.

    Raises:
        InputError: the configuration, the data or the output folder cannot be used.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    from kfp_ddp.training import distributed, resume, trainer

    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    world = distributed.start(config)
    print(
        f"rank {world.rank} of {world.size} on {socket.gethostname()}, {world.device}", flush=True
    )
    try:
        launches = world.gather(os.environ.get(LAUNCH, ""))
        training, validation = world.from_first(lambda: _scan(config))
        config = world.from_first(lambda: _resolve(config, world, len(training), launches))
        caches = _built_or_examined(config, world, training, validation)
        world.from_first(lambda: resume.begin(config, launches))
        loop = trainer.Trainer(
            config,
            world,
            trainer.Split(training, caches[0]),
            trainer.Split(validation, caches[1]),
        )
        loop.stop.on_signals()
        if parent is not None:
            parent.on_gone = lambda: loop.stop.ask("the launcher is gone")
        if config.stop_when_stale and world.first:
            Heartbeat(
                Path(config.stop_when_stale),
                config.stale_seconds,
                lambda: loop.stop.ask(STALE),
            )
        done = loop.fit()
        if not done and loop.stop.reason == STALE:
            _write_record(STALE, PREEMPTED, final=True, retryable=True)
            end_for_good()
        if done and caches[0] is not None and world.local_rank == 0:
            caches[0].remove()
    except BaseException:
        distributed.leave(world, in_order=False)
        raise
    distributed.leave(world, in_order=True)
    return done


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


def _resolve(
    config: TrainConfig, world: "World", samples: int, launches: Sequence[str] = ()
) -> TrainConfig:
    """The configuration with its automatic values filled in, written to config.json.

    `launches` are the ids of the ranks' launchers.

    Raises:
        InputError: the batch cannot be divided among the ranks, or there are too few images for it.
    """
    import torch

    from kfp_ddp.training import resume

    ranks = world.size
    if config.strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single but {ranks} ranks: launch one, or use strategy=ddp")
    config.check_one_each(samples, ranks)
    if resume.goes_on(config, launches):
        config = config.model_copy(update={"resume": "auto"})
    batch, micro = config.batch_size, config.micro_batch_size
    before = resume.earlier_batches(config)
    if config.batch_size_per_rank:
        batch = before[0] if before else config.batch_size_per_rank * ranks
    if before and before[0] == batch and batch // before[1] >= ranks:
        micro = micro or before[1]
    if samples < batch:
        raise InputError(f"batch_size={batch} but only {samples} training images; lower batch_size")
    # With unequal numbers sharded ranks would gather unequally often, and hang.
    uneven = "KFP_DDP_ELASTIC" in os.environ and config.strategy != "fsdp"
    config.check_dealt(batch, micro, ranks, uneven)
    precision = config.precision
    if precision == "auto":
        cuda = world.device.type == "cuda"
        bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if bf16 else "fp32"
    resolved = config.model_copy(
        update={
            "batch_size": batch,
            "micro_batch_size": micro or batch // ranks,
            "precision": precision,
        }
    )
    (Path(config.output_dir) / "config.json").write_text(resolved.to_json() + "\n")
    return resolved


def _built_or_examined(
    config: TrainConfig, world: "World", training: "Index", validation: "Index"
) -> "list[Cache | None]":
    """A cache of each split where both fit; otherwise images are only tried, and it is None.

    Raises:
        InputError: the first problem of any rank, on all ranks.
    """
    from kfp_ddp.training.cache import Cache, folder_for
    from kfp_ddp.training.images import Findings, examine

    found: list[Findings] = []
    caches: list[Cache | None] = []
    problem, folder = "", None
    try:
        folder = folder_for(config, [training.paths, validation.paths])
        for split, name in ((training, "train"), (validation, "val")):
            if folder is None:
                caches.append(None)
                stride = max(1, -(-len(split) // max(1, config.verify_images)))
                chosen = range(0, len(split) if config.verify_images else 0, stride)
                mine = chosen[world.rank :: world.size]
                found.append(examine(split.paths, mine, config))
            else:
                cache = Cache(folder, name, len(split), world.local_size)
                caches.append(cache)
                built = cache.build(split.paths, config, name == "train", world.local_rank)
                found.append(built)
    except InputError as error:
        problem = str(error)
    for line in world.gather(problem):
        if line:
            found_first = InputError(line)
            found_first.consequence = line != problem
            raise found_first
    part = world.rank if folder is None else world.local_rank
    _warn(world.gather((part, found)), world.first)
    return caches


def _warn(found: "list[tuple[int, list[Findings]]]", first: bool) -> None:
    """One line if images had to be converted or could not be read.

    `found` holds each rank's part and what it saw of it in each split. Every node looks at all
    parts for its cache, unless another had filled it: a part counts once.
    """
    seen: dict[tuple[int, int], Findings] = {}
    for part, splits in found:
        for number, item in enumerate(splits):
            seen[part, number] = max(item, seen.get((part, number), item))
    findings = list(seen.values())
    checked = sum(item.checked for item in findings)
    broken = sum(item.broken for item in findings)
    not_rgb = sum(item.not_rgb for item in findings)
    not_square = sum(item.not_square for item in findings)
    unusual = [item.first_unusual for item in findings if item.first_unusual]
    if broken and first:
        print(f"warning: {broken} of {checked} images cannot be read", file=sys.stderr, flush=True)
    if unusual and first:
        print(
            f"warning: of {checked} images checked, {not_rgb} are not RGB and {not_square} not "
            f"square (first {unusual[0]}); they are converted and resized, images=strict refuses "
            "them",
            file=sys.stderr,
            flush=True,
        )


def _record(error: Exception) -> None:
    """Tell the launcher what ended this rank, in the form that torch elastic reads."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, InputError):
        _write_record(line, USAGE, True, error.retryable, error.consequence)
    else:
        line = f"{type(error).__name__}: {line}"
        _write_record(line, 1, final=False, consequence=_lost_a_peer(error))


def _write_record(
    line: str, code: int, final: bool, retryable: bool = False, consequence: bool = False
) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    record = {
        "message": {
            "message": line,
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(now))},
        },
        "exact_time": now,
        "exit_code": code,
        "rank": int(os.environ.get("RANK", "0")),
        "final": final,
        "retryable": retryable,
        "consequence": consequence,
    }
    Path(path).write_text(json.dumps(record))


def _lost_a_peer(error: Exception) -> bool:
    """Whether this error only says that another rank went away."""
    words = (
        *("connection closed", "connection reset", "connection refused", "broken pipe"),
        *("nccl", "timed out waiting"),
    )
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
