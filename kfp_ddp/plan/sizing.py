"""Size a training by its images and the hardware of its job, where the recipe is auto."""

import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.settings import rename
from kfp_ddp.datasets.images import sample
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.objects import parse_quantity
from kfp_ddp.models import weights_download
from kfp_ddp.models.weights_download import RANDOM_START, Start
from kfp_ddp.pictures.header import frame_of
from kfp_ddp.pictures.layout import LayoutRule
from kfp_ddp.plan.choice import (
    Choice,
    Machine,
    Photographs,
    choose,
    merged,
    statistics_of,
    this_machine,
)
from kfp_ddp.plan.settings import Run, parse
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
    parameters, config, spec = run.parameters, run.config, run.spec
    if parameters.recipe != "auto" or parameters.checkpoint or config.script:
        return run, []
    local = parameters.backend == "local"
    photographs, machine = _photographs(run), this_machine() if local else _machine(spec)
    ranks = (spec.nproc_per_node or 0) if local else spec.nodes * spec.processes()
    find = partial(weights_download.find, own_image="image" in parameters.job)
    requested = {**run.inputs, "pretrained": config.pretrained}
    choice, start = choose_weights(photographs, machine, requested, ranks, find)
    inputs = {name: choice.arguments.get(name, value) for name, value in requested.items()}
    inputs["recipe"] = "none"  # finetune with weights, but a trial may start without
    if start:  # Keep `true`: a trial with another network needs other weights.
        inputs["pretrained"] = "true" if config.pretrained == "auto" else config.pretrained
    if not local:
        inputs["gpus_per_node"] = spec.gpus()
    optimizers = {trial.optimizer for trial in run.trials}
    if optimizers - {config.optimizer}:
        inputs["rates"] = {}
        for optimizer in optimizers:
            other = merged(_normalise_arguments(requested), {"training": {"optimizer": optimizer}})
            theirs = choose(photographs, machine, other, ranks, weights=bool(start))
            inputs["rates"][optimizer] = _rates(theirs.arguments["training"])
        chosen = _rates(inputs["training"]).keys() - config.explicit().keys()
        inputs["training"] = {n: v for n, v in inputs["training"].items() if n not in chosen}
    seen = "images that this step cannot see" if photographs is UNSEEN else str(photographs)
    lines = [f"chosen for {seen} and {machine}: {choice.why}"]
    if choice.minutes and photographs is not UNSEEN:
        cost = priced(choice.minutes / 60 * ranks, config.model_dump(), bool(machine.gpus))
        lines.append(f"estimate: {choice.minutes:.0f} min of training, {cost}")
    lines += [start.origin] if start.origin and not start else []
    if choice.warning and photographs is not UNSEEN:
        lines.append(f"warning: {choice.warning}")
    return parse(inputs), lines


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
    pretrained, recipe = requested.get("pretrained", "auto"), requested.get("recipe", "auto")
    if recipe == "finetune" and pretrained == "auto":
        pretrained = "true"
    known = weights_download.network_in(pretrained)
    unset = requested.get("model", "auto") == "auto"
    if known and unset:
        requested = {**requested, "model": known}
    random = choose(photographs, machine, requested, ranks)
    tuned, start = random, RANDOM_START
    # Networks for tiny images have no weights, and a script may take none.
    suits = recipe in ("auto", "none") and not requested.get("training", {}).get("script")
    if pretrained != "auto" or (suits and files_of(random.arguments["model"])):
        tuned = choose(photographs, machine, requested, ranks, weights=True)
        model = tuned.arguments.get("model", TrainConfig.model_fields["model"].default)
        # However many images: random weights that need smaller ones for their time are no gain.
        sizes = [one.arguments["training"].get("image_size", 0) for one in (random, tuned)]
        images = 0 if sizes[0] < sizes[1] else photographs.train + photographs.val
        start = find(pretrained, model, images)
    choice = tuned if start else random
    choice.arguments["pretrained"] = start.pretrained
    if start and unset and not start.model:
        choice.arguments["model"] = "auto"  # the workers read it from the weights
    return choice, start


def _normalise_arguments(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with each setting either in its box or in `training`, as chosen ones."""
    training = rename(requested.get("training", {}), TrainConfig)
    boxes = {name: training.pop(name) for name in BOXES if name in training}
    if requested.get("batch_size"):
        training["batch_size"], boxes["batch_size"] = requested["batch_size"], 0
    return {**requested, **boxes, "training": training}


def _photographs(run: Run) -> Photographs:
    source = run.parameters.source
    if not is_remote(source) and not Path(source).is_dir():
        return UNSEEN
    rule = LayoutRule(**{name: getattr(run.config, name) for name in LayoutRule._fields})
    layout, contents = sample(source, options_of(run.dataset.dataset, run.sync), rule)
    about = statistics_of([header for content in contents if (header := _header(content))])
    counts = len(layout.train), len(layout.val), len(layout.classes)
    return Photographs(*counts, *about)


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
    pods, gpus = spec.nodes, spec.gpus()
    device: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    limit = spec.requested()["limits"].get("cpu")
    cores = int(parse_quantity(limit)) if limit else CORES[device] * spec.processes()
    return Machine(max(1, cores) * pods, 0.0, device, gpus * pods, pods)
