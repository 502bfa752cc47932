"""What the inputs of a run come to by themselves: no bucket, no cluster, no folder is looked at."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kfp_ddp.checks.preflight.parameters import (
    LAST,
    SUBJECTS,
    Dataset,
    Parameters,
    StepResources,
    filled_in,
)
from kfp_ddp.checks.preflight.sweep import Sweep, trials_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.settings import split
from kfp_ddp.datasets.access import options_on_nodes
from kfp_ddp.datasets.options import dataset_name
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.volume.request import check_strategy
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.supervision import JOB_OWN, Supervision, check_backend
from kfp_ddp.models.bundle import check_model_name
from kfp_ddp.models.release import MODELS as PARTS
from kfp_ddp.models.release import part_of
from kfp_ddp.runs.notify import Notification
from kfp_ddp.storage.addresses import check_place
from kfp_ddp.training.batches import check_divides
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.recipes import configured

BOX = "has a box of its own"


class Settled(NamedTuple):
    """What the inputs of a run come to."""

    parameters: Parameters
    dataset: Dataset
    sync: dict[str, Any]
    config: TrainConfig
    spec: LaunchSpec
    supervision: dict[str, Any]
    steps: StepResources
    gate: dict[str, Any]
    measuring: dict[str, Any]
    release: dict[str, Any]
    champion: str
    trials: list[TrainConfig]


def settled(inputs: Mapping[str, Any]) -> Settled:
    """Take the inputs apart by subject, and check each.

    Args:
        inputs: The component's inputs by name: boxes, mappings and `image`.

    Raises:
        InputError: the first parameter that cannot be used, in the order of the steps.
    """
    given = {name: inputs[name] for name in Parameters.model_fields if name in inputs}
    parameters = Parameters.create(**given)
    for name in ("source", "destination", "champion", "work", "checkpoint"):
        place = getattr(parameters, name)
        if place != LAST:
            check_place(name, place)
    dataset, sync = _dataset(parameters, inputs["publish"])
    config = _training(parameters, inputs)
    spec, supervision, steps = _job(parameters, inputs)
    check_model_name(parameters.model_name)
    gate, measuring, rules = _judging(parameters)
    released = _release(parameters)
    champion = _champion(parameters, rules)
    if inputs["gpus_per_node"] != -1 or spec.nproc_per_node:
        check_batch(config, spec, parameters.backend)
    trials = _trials(parameters, inputs)
    return Settled(
        parameters,
        dataset,
        sync,
        config,
        spec,
        supervision,
        steps,
        gate,
        measuring,
        released,
        champion,
        trials,
    )


def _dataset(parameters: Parameters, publish: str) -> tuple[Dataset, dict[str, Any]]:
    """The dataset with its name, and the options of its sync, refused where nothing would be left.

    Raises:
        InputError: naming the setting.
    """
    ours, sync = split("sync", parameters.sync, *SUBJECTS["sync"], own={})
    name = dataset_name(str(ours.get("dataset", "")), parameters.source)
    if publish and ours.setdefault("publish", publish) != publish:
        raise InputError(
            f"sync sets publish={ours['publish']!r}, but this pipeline mounts no claim for data: "
            "leave it out, or take the pipeline train_resnet_bucket"
        )
    dataset = Dataset.create(**{**ours, "dataset": name})
    check_strategy(dataset.publish, parameters.source)
    options = options_of(name, sync)
    if options.dry_run:
        raise InputError("sync sets dry_run, which leaves nothing to train on; leave it out")
    if dataset.publish == "each-node":
        options_on_nodes(sync)
        sync["dry_run"] = True  # the step lists; who reads the files brings them
    return dataset, sync


def _trials(parameters: Parameters, inputs: Mapping[str, Any]) -> list[TrainConfig]:
    """The training of each trial; none where nothing is swept.

    Raises:
        InputError: naming the trial and its setting.
    """
    (given,) = split("sweep", parameters.sweep, *SUBJECTS["sweep"], own={})
    if not given:
        return []
    sweep, found = Sweep.create(**given), []
    for trial in trials_of(sweep):
        (trial,) = split("a trial of sweep", trial, TrainConfig, own={})
        stop = {"stop_behind_epochs": sweep.stop_behind_epochs}
        try:
            found.append(_training(parameters, inputs, stop, trial))
        except InputError as error:
            raise InputError(f"the trial {json.dumps(trial)} of sweep: {error}") from None
    return found


def _training(
    parameters: Parameters,
    inputs: Mapping[str, Any],
    under: Mapping[str, Any] = {},
    over: Mapping[str, Any] = {},
) -> TrainConfig:
    """The training, with folders that its step will set; settings go under and over those given.

    Raises:
        InputError: naming the setting.
    """
    own = {n: BOX for n, value in inputs.items() if n in TrainConfig.model_fields and value != ""}
    if parameters.sweep:
        own.pop("batch_size", None)  # the form of a sweep has no box for it
    (training,) = split("training", parameters.training, *SUBJECTS["training"], own=own)
    folders = {"data": data_dir(), "output_dir": work_dir()}
    given = {**under, **filled_in(inputs, TrainConfig), **training, **over, **folders}
    return configured(parameters.recipe, given)


def _job(
    parameters: Parameters, inputs: Mapping[str, Any]
) -> tuple[LaunchSpec, dict[str, Any], StepResources]:
    """The job that `train` creates, but for its command, how it is watched, and what steps take.

    Raises:
        InputError: naming the setting.
    """
    own = {**JOB_OWN, **dict.fromkeys(("nodes", "gpus_per_node"), BOX)}
    job, supervision, steps, told = split("job", parameters.job, *SUBJECTS["job"], own=own)
    Notification.create(**told)
    Supervision.create(**supervision)
    check_backend(parameters.backend, inputs["nodes"])
    kind = "pytorchjob" if parameters.backend == "local" else parameters.backend
    boxes = {"nodes": inputs["nodes"], "kind": kind, "command": ["true"]}
    if inputs["gpus_per_node"] != -1:
        boxes["gpus_per_node"] = inputs["gpus_per_node"]
    spec = LaunchSpec.create(**{"image": inputs["image"], **job, **boxes})
    return spec, supervision, StepResources.create(**steps)


def _judging(parameters: Parameters) -> tuple[dict[str, Any], dict[str, Any], Rules]:
    """The rules, and what is measured for them, refused where a rule could only fail.

    Raises:
        InputError: naming the setting.
    """
    gate, measuring = split("gate", parameters.gate, *SUBJECTS["gate"], own={})
    rules, asked = Rules.create(**gate), Measuring.create(**measuring)
    if parameters.checkpoint and rules.need_bundle:
        raise InputError(
            f"gate sets {rules.need_bundle[0]}, which looks at a bundle, and this pipeline exports "
            "none: leave it out"
        )
    if rules.min_slice_accuracy and not asked.tags:
        raise InputError(
            "gate sets min_slice_accuracy, and no tags that make slices: give tags too, a CSV of "
            "path and tags"
        )
    return gate, measuring, rules


def _release(parameters: Parameters) -> dict[str, Any]:
    """What was set of the release, each part of which is refused here where it cannot be used.

    Raises:
        InputError: naming the setting.
    """
    parts = [part_of(parameters.release, model) for model in PARTS]
    return {name: value for part in parts for name, value in part.given().items()}


def _champion(parameters: Parameters, rules: Rules) -> str:
    """The folder or address of the model to beat; empty for none.

    Raises:
        InputError: the rules need one, or it is the last of no destination.
    """
    champion, own = parameters.champion.rstrip("/"), exported_to(parameters)
    if champion == LAST:
        if not own:
            raise InputError("champion=last is the last model at destination, which is empty")
        champion = own
    rules.check_champion(champion)
    return champion


def exported_to(parameters: Parameters) -> str:
    """The folder of this model's exports, where a first champion is still to come; '' for none."""
    where = parameters.destination.rstrip("/")
    return f"{where}/{parameters.model_name}" if where else ""


def check_batch(config: TrainConfig, spec: LaunchSpec, backend: str) -> None:
    """Refuse a batch that was set and cannot be dealt among ranks whose number is known.

    Raises:
        InputError: naming a batch that can.
    """
    known = backend != "local" or spec.nproc_per_node
    if known and config.is_set("batch_size") and not config.batch_size_per_rank:
        uneven = bool(spec.elastic) and config.strategy != "fsdp"
        ranks = spec.pods() * spec.processes()
        check_divides(config.batch_size, config.micro_batch_size, ranks, uneven)
