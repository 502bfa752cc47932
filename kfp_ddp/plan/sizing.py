"""Size a training by its images and the hardware of its job, where the recipe is auto."""

import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.settings import rename
from kfp_ddp.datasets.images import sample
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.objects import parse_quantity
from kfp_ddp.models import weights_download
from kfp_ddp.models.weights_download import RANDOM_START, Start
from kfp_ddp.pictures.header import frame_of
from kfp_ddp.plan.choice import (
    Choice,
    Machine,
    Photographs,
    choose,
    cut_off,
    merged,
    statistics_of,
    this_machine,
)
from kfp_ddp.plan.settings import Run, parse
from kfp_ddp.plan.sweep import Sweep, number_of
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.recipes import OPTIMIZER_FIELDS
from kfp_ddp.training.spec.time_spent import priced
from kfp_ddp.training.spec.torchvision_weights import files_of

BOXES = ("model", "epochs", "pretrained")
"""Settings of a training that are parameters of the form."""
CORES = {"cpu": 4, "cuda": 8}
"""Assumed cores of a process whose pod has no limit, by device."""
UNSEEN = Photographs(10_000, 1_000, 0, 0)
"""Assumed where the source is a folder that this step does not mount."""


def sized(run: Run) -> tuple[Run, list[str]]:
    """Return the run with the settings of `choose`, and what was chosen and why, in lines.

    Unchanged and without lines for another recipe, for an evaluation alone, and for a script.
    KfpDdpError: the source cannot be read, or no training is possible with its images.
    """
    parameters = run.parameters
    if parameters.recipe != "auto":
        return run, []
    if parameters.checkpoint or run.config.script:
        return run, []
    photographs = _photographs(run)
    hardware = _hardware(run)
    find = partial(weights_download.find, own_image="image" in parameters.job)
    requested = {**run.inputs, "pretrained": run.config.pretrained}
    choice, start = choose_weights(photographs, hardware.machine, requested, hardware.ranks, find)
    inputs = _chosen_inputs(run, requested, choice, start)
    rates = _rates_by_optimizer(run, photographs, hardware, requested, bool(start))
    if rates:
        # Each trial takes the rates of its optimizer, so the training has none of its own.
        own = run.config.explicit().keys()
        chosen = _rates(inputs["training"]).keys() - own
        inputs["rates"] = rates
        inputs["training"] = {
            name: value for name, value in inputs["training"].items() if name not in chosen
        }
    return parse(inputs), _lines(run, photographs, hardware, choice, start)


def sweep_minutes(run: Run, sweep: Sweep) -> float:
    """Return the estimated duration of all trials, one after the other.

    It is 0 if the speed of a network is unknown. Of trials that are drawn the examples give the
    mean. KfpDdpError: the source cannot be read.
    """
    photographs = _photographs(run)
    machine, ranks = _hardware(run)
    minutes = []
    for trial in run.trials:
        training = {"image_size": trial.image_size, "randaugment": trial.randaugment}
        requested = {"model": trial.model, "epochs": trial.epochs, "training": training}
        own = choose(photographs, machine, requested, ranks).minutes
        minutes.append(own * sweep.share(trial.epochs))
    total = fmean(minutes) * number_of(sweep) * all(minutes)
    return min(total, sweep.max_minutes or total)


class _Hardware(NamedTuple):
    """Where a training computes."""

    machine: Machine
    ranks: int
    """0 for a number to choose."""


def _hardware(run: Run) -> _Hardware:
    spec = run.spec
    if run.parameters.backend == "local":
        return _Hardware(this_machine(), spec.nproc_per_node or 0)
    return _Hardware(_machine(spec), spec.nodes * spec.processes())


def _chosen_inputs(
    run: Run, requested: Mapping[str, Any], choice: Choice, start: Start
) -> dict[str, Any]:
    """Return the inputs of preflight with the chosen settings."""
    inputs = {name: choice.arguments.get(name, value) for name, value in requested.items()}
    inputs["recipe"] = "none"  # finetune with weights, but a trial may start without
    if start:
        # Keep `true`: a trial with another network needs other weights.
        given = run.config.pretrained
        inputs["pretrained"] = "true" if given == "auto" else given
    if run.parameters.backend != "local":
        inputs["gpus_per_node"] = run.spec.gpus()
    return inputs


def _rates_by_optimizer(
    run: Run,
    photographs: Photographs,
    hardware: _Hardware,
    requested: Mapping[str, Any],
    weights: bool,
) -> dict[str, dict[str, Any]]:
    """Return the chosen rates of each optimizer of a sweep; empty if all have the training's."""
    optimizers = {trial.optimizer for trial in run.trials}
    if not optimizers - {run.config.optimizer}:
        return {}
    rates: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        over = {"training": {"optimizer": optimizer}}
        arguments = merged(_normalise_arguments(requested), over)
        choice = choose(photographs, hardware.machine, arguments, hardware.ranks, weights=weights)
        rates[optimizer] = _rates(choice.arguments["training"])
    return rates


def _lines(
    run: Run, photographs: Photographs, hardware: _Hardware, choice: Choice, start: Start
) -> list[str]:
    """Return what was chosen and why; without images no estimate holds."""
    seen = photographs is not UNSEEN
    images = str(photographs) if seen else "images that this step cannot see"
    lines = [f"chosen for {images} and {hardware.machine}: {choice.why}"]
    if seen and choice.minutes:
        hours = choice.minutes / 60 * hardware.ranks
        cost = priced(hours, run.config.model_dump(), bool(hardware.machine.gpus))
        lines.append(f"estimate: {choice.minutes:.0f} min of training, {cost}")
    if start.origin and not start:
        lines.append(start.origin)
    if run.parameters.backend != "local":  # there the survey says so
        lines += photographs.notes
    if seen and choice.warning:
        lines.append(f"warning: {choice.warning}")
    return lines


def _rates(training: Mapping[str, Any]) -> dict[str, Any]:
    return {name: training[name] for name in OPTIMIZER_FIELDS if name in training}


def choose_weights(
    photographs: Photographs,
    machine: Machine,
    requested: Mapping[str, Any],
    ranks: int,
    find: Callable[[str, str, int], Start],
) -> tuple[Choice, Start]:
    """Return settings as `choose`, and the weights that the training starts from.

    `find` is `weights_download.find` or `obtain`. InputError: requested weights cannot be had.
    """
    requested = _normalise_arguments(requested)
    pretrained = requested.get("pretrained", "auto")
    recipe = requested.get("recipe", "auto")
    if recipe == "finetune" and pretrained == "auto":
        pretrained = "true"
    known = weights_download.network_in(pretrained)
    any_model = requested.get("model", "auto") == "auto"
    if known and any_model:
        requested = {**requested, "model": known}
    random = choose(photographs, machine, requested, ranks)
    choice = random
    start = RANDOM_START
    # Networks for tiny images have no weights, and a script may take none.
    suits = recipe in ("auto", "none") and not requested.get("training", {}).get("script")
    if pretrained != "auto" or (suits and files_of(random.arguments["model"])):
        tuned = choose(photographs, machine, requested, ranks, weights=True)
        model = tuned.arguments.get("model", TrainConfig.model_fields["model"].default)
        images = photographs.train + photographs.val
        if _image_size(random) < _image_size(tuned):
            # However many images: random weights that need smaller ones for their time are no gain.
            images = 0
        start = find(pretrained, model, images)
        if start:
            choice = tuned
    choice.arguments["pretrained"] = start.pretrained
    unknown = any_model and not start.model
    if start and unknown:
        choice.arguments["model"] = "auto"  # the workers read it from the weights
    return choice, start


def _image_size(choice: Choice) -> int:
    size: int = choice.arguments["training"].get("image_size", 0)
    return size


def _normalise_arguments(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with each setting either in its box or in `training`, as chosen ones."""
    training = rename(requested.get("training", {}), TrainConfig)
    boxes = {name: training.pop(name) for name in BOXES if name in training}
    if requested.get("batch_size"):
        training["batch_size"] = requested["batch_size"]
        boxes["batch_size"] = 0
    return {**requested, **boxes, "training": training}


def _photographs(run: Run) -> Photographs:
    source = run.parameters.source
    if not is_remote(source) and not Path(source).is_dir():
        return UNSEEN
    options = options_of(run.dataset.dataset, run.sync)
    layout, contents = sample(source, options, run.config.layout_rule)
    headers = [header for header in map(_header, contents) if header is not None]
    short_side, decoding = statistics_of(headers)
    return Photographs(
        train=len(layout.train),
        val=len(layout.val),
        classes=len(layout.classes),
        short_side=short_side,
        decoding=decoding,
        notes=tuple(cut_off(headers, run.config.fit)),
    )


def _header(data: bytes) -> tuple[str, int, int] | None:
    """Return format, width and height of a JPEG, PNG or BMP, without Pillow; None for others."""
    if frame := frame_of(data):
        return "JPEG", frame.width, frame.height
    if data[12:16] == b"IHDR" and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
        return "PNG", width, height
    if data[:2] == b"BM" and len(data) >= 26:
        width, height = struct.unpack_from("<ii", data, 18)
        return "BMP", width, abs(height)
    return None


def _machine(spec: LaunchSpec) -> Machine:
    """Return the resources of all pods of a job together."""
    gpus = spec.gpus()
    device: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    limit = spec.requested()["limits"].get("cpu")
    cores = int(parse_quantity(limit)) if limit else CORES[device] * spec.processes()
    return Machine(
        cores=max(1, cores) * spec.nodes,
        memory_gb=0.0,
        device=device,
        gpus=gpus * spec.nodes,
        pods=spec.nodes,
    )
