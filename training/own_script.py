"""A user's own training script in place of the loop; README.md has its inputs and results."""

import csv
import json
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import PREEMPTED, InputError, JobError, writing
from kfp_ddp.core.failure import Failure, in_memory, write_record
from kfp_ddp.core.log import log
from kfp_ddp.core.packed import unpack
from kfp_ddp.core.run_folder import RunFolder, try_to_write
from kfp_ddp.core.text import from_json
from kfp_ddp.pictures.splits import Splits
from kfp_ddp.training.distributed import gpu_or_cpu
from kfp_ddp.training.model import networks
from kfp_ddp.training.prepare import check_network, with_splits
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import step_dir
from kfp_ddp.training.spec.metrics import Metrics
from kfp_ddp.training.state import checkpoint, initial_weights, saving
from kfp_ddp.training.watch import LAUNCH, Heartbeat, end_for_good

WEIGHTS = ("model.safetensors", "model.pt")
RESULT = "result.json"
IMAGES = "KFP_DDP_IMAGES"
CONFIG = "KFP_DDP_CONFIG"
OUTPUT = "KFP_DDP_OUTPUT"
STOPPED = (PREEMPTED, 130)
"""Exit codes of a script that stopped on request: by SIGTERM or an interrupt."""


def run(config: TrainConfig) -> bool:
    """Run the script, and save its weights; False when preempted. Raise a KfpDdpError."""
    folder = RunFolder(config.output_dir)
    first = os.environ.get("RANK", "0") == "0"
    if config.device == "auto":
        gpu_or_cpu()
    config, splits = with_splits(config)
    if splits.train.slices is not None:
        raise InputError("a script reads image files, but these are packed: do not set pack=tar")
    launches = [os.environ.get(LAUNCH, "")]
    if saving.continues(config, launches):
        config = config.model_copy(update={"resume": "auto"})
    if config.resume != "never" and (done := checkpoint.newest_valid(folder.checkpoints)):
        if first:
            log.info(f"nothing to train: {done.path} is saved")
        return True
    if first:
        _begin(config, folder, splits)
        saving.begin(config, launches)
    with tempfile.TemporaryDirectory(prefix="kfp-ddp-script-") as inputs:
        _write_inputs(Path(inputs), config, splits)
        if not call(f"{inputs}/script.py", shlex.split(config.script_args)):
            return False
    if first:
        _finish(config, folder, splits)
    return True


def _begin(config: TrainConfig, folder: RunFolder, splits: Splits) -> None:
    with writing(folder.path):
        try_to_write(folder.path)
    check_network(config, splits.train.classes)

    def stop() -> None:
        write_record(Failure(PREEMPTED, 0, "the heartbeat is stale", retryable=True), final=True)
        end_for_good()
        os._exit(PREEMPTED)

    if config.stop_when_stale:
        Heartbeat(Path(config.stop_when_stale), config.stale_seconds, stop)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    metrics = Metrics(folder.metrics)
    metrics.write("start", world_size=world, steps_total=0, resumed_from_step=0)
    metrics.close()


def _write_inputs(inputs: Path, config: TrainConfig, splits: Splits) -> None:
    classes = splits.train.classes
    with (inputs / "images.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "class", "target", "split"))
        for split, index in (("train", splits.train), ("val", splits.val)):
            for path, target in zip(index.paths, index.targets, strict=True):
                rows.writerow((path, classes[target], target, split))
    mean, std, _ = timm_networks.preprocessing(config.model)
    settings = {**config.model_dump(), "classes": classes, "mean": mean, "std": std}
    (inputs / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (inputs / "script.py").write_bytes(unpack(config.script, "script"))
    os.environ.update(
        {IMAGES: f"{inputs}/images.csv", CONFIG: f"{inputs}/config.json", OUTPUT: config.output_dir}
    )


def call(file: str, arguments: Sequence[str]) -> bool:
    """Run a file with its arguments as the main program; False when it stopped on request."""
    before = sys.argv
    sys.argv = [file, *arguments]
    os.environ.pop("PYTHONSAFEPATH", None)  # programs that it starts may have modules beside them
    try:
        with in_memory("lower the batch size of the script"):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code in STOPPED:
            return False
        if ended.code:
            raise JobError(f"the script ended with {ended.code}") from None
    finally:
        sys.argv = before
    return True


def _finish(config: TrainConfig, folder: RunFolder, splits: Splits) -> None:
    files = (folder.path / name for name in WEIGHTS)
    weights = next((file for file in files if file.is_file()), None)
    if weights is None:
        raise InputError(
            f"the script saved no weights: let rank 0 save the network's state_dict as "
            f"{' or '.join(WEIGHTS)} in ${OUTPUT}"
        )
    classes = splits.train.classes
    network = networks.build_for(config, len(classes))
    saved = initial_weights.read(weights)
    advice = "set model to the script's network"
    initial_weights.load_all(network, config, saved, str(weights), advice)
    figures = _result(folder.path / RESULT)
    step = int(figures.pop("step", config.epochs))
    manifest = checkpoint.manifest_of(
        config,
        classes,
        epoch=float(config.epochs),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        samples=len(splits.train),
        metrics=figures,
        best=None,
    )
    writer = checkpoint.Writer(folder.checkpoints, config.keep_checkpoints)
    writer.save(step, {"model": network.state_dict(), "ema": None}, manifest)
    writer.wait()
    metrics = Metrics(folder.metrics)
    if figures:
        metrics.write("eval", step=step, epoch=config.epochs, **figures)
    metrics.write("checkpoint", step=step, path=str(step_dir(folder.checkpoints, step)))
    metrics.write("end", status="done", step=step)
    metrics.close()


def _result(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        result = from_json(file.read_text())
        names = ("step", "accuracy", "loss")
        return {name: float(result[name]) for name in names if name in result}
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"step, accuracy and loss in {file.name} must be numbers: {error}; correct the script"
        ) from None
