"""Check the settings of a run offline, and split them by subject."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.settings import rename, split
from kfp_ddp.datasets.options import dataset_name
from kfp_ddp.datasets.settings import options_of
from kfp_ddp.datasets.volume.request import check_strategy
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL, LaunchSpec, Supervision, check_backend
from kfp_ddp.models.release import MODELS as PARTS
from kfp_ddp.models.release import check_model_name, part_of
from kfp_ddp.models.weights_download import RANDOM_START, Start
from kfp_ddp.plan.form import (
    LAST,
    SUBJECTS,
    DatasetSettings,
    Parameters,
    StepResources,
    set_fields,
)
from kfp_ddp.plan.sweep import Sweep, examples_of
from kfp_ddp.runs.notify import Notification
from kfp_ddp.storage.address import check_address
from kfp_ddp.training.spec.batches import check_divides, check_single
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.recipes import configured

Finder = Callable[..., Start]
PARAMETER = "is a parameter of the form"
OPTIONAL = {"publish": "", "nodes": 1, "gpus_per_node": -1}
"""Inputs of preflight, with its defaults, that a compiled pipeline may lack."""


@dataclass
class Run:
    """The checked settings of a run; a check of the cluster may set the GPUs of its job."""

    inputs: Mapping[str, Any]
    """Inputs of preflight by name."""
    parameters: Parameters
    dataset: DatasetSettings
    sync: dict[str, Any]
    config: TrainConfig
    start: Start
    """Initial weights, once they were looked for."""
    spec: LaunchSpec
    """The job of `train`, without its command."""
    supervision: dict[str, Any]
    steps: StepResources
    gate: dict[str, Any]
    measuring: dict[str, Any]
    release: dict[str, Any]
    champion: str
    """Folder or URI of the model to beat; empty for none."""
    sweep: Sweep | None
    trials: list[TrainConfig]
    """Trials of the sweep, or examples where they are drawn."""

    @property
    def mounts(self) -> dict[str, str]:
        """Mounted PVC by path."""
        mounts = {}
        if not self.inputs["publish"] and self.dataset.claim:
            mounts[data_dir()] = self.dataset.claim
        if not self.parameters.work and self.parameters.work_claim:
            mounts[work_dir()] = self.parameters.work_claim
        return mounts

    @property
    def own_network(self) -> bool:
        """Whether the run evaluates weights of the network that its settings name."""
        return bool(self.parameters.checkpoint) and self.config.is_set("model")

    def check_batch(self) -> None:
        """Raise InputError if strategy or requested batch do not suit a known number of ranks."""
        config = self.config
        spec = self.spec
        if self.parameters.backend == "local" and not spec.nproc_per_node:
            return
        ranks = spec.nodes * spec.processes()
        if not config.script:
            check_single(config, ranks)
        if config.is_set("batch_size") and not config.batch_size_per_rank:
            check_divides(config.batch_size, config.micro_batch_size, ranks)


def parse(inputs: Mapping[str, Any]) -> Run:
    """Return the checked inputs of preflight, without access to a bucket, cluster or folder.

    InputError: a parameter is invalid; the first one in the order of the steps.
    """
    inputs = {**OPTIONAL, **rename(inputs, TrainConfig)}  # former names: compiled earlier
    own = {name: inputs[name] for name in Parameters.model_fields if name in inputs}
    parameters = Parameters.create(**own)
    for name in ("source", "destination", "champion", "work", "checkpoint"):
        uri = getattr(parameters, name)
        if uri != LAST:
            check_address(name, uri)
    dataset, sync = _dataset(parameters, inputs["publish"])
    config, start = _training(parameters, inputs)
    if config.sampling != "uniform" and sync.get("pack", "none") != "none":
        raise InputError(
            f"training sets sampling={config.sampling}, which repeats single images, and sync sets "
            "pack=tar, which is read in sequence: leave pack out, or use class_weights=balanced"
        )
    spec, supervision, steps = _job(parameters, inputs)
    check_model_name(parameters.model_name)
    gate, measuring, rules = _gate(parameters)
    champion = parameters.champion.rstrip("/")
    if champion == LAST:
        champion = parameters.exports
        if not champion:
            raise InputError("champion=last is the last model at destination, which is empty")
    rules.check_champion(champion)
    parts = [part_of(parameters.release, model) for model in PARTS]
    sweep = _sweep(parameters, inputs)
    run = Run(
        inputs=inputs,
        parameters=parameters,
        dataset=dataset,
        sync=sync,
        config=config,
        start=start,
        spec=spec,
        supervision=supervision,
        steps=steps,
        gate=gate,
        measuring=measuring,
        release={name: value for part in parts for name, value in part.explicit().items()},
        champion=champion,
        sweep=sweep,
        trials=_trials(sweep, parameters, inputs),
    )
    _check_own_network(run)
    if inputs["gpus_per_node"] != -1 or spec.nproc_per_node:
        run.check_batch()
    return run


def with_weights(run: Run, find: Finder) -> Run:
    """Return the run with initial weights as the workers take them; raise InputError without them.

    `find` is `models.weights_download.find`.
    """
    find = cache(find)
    config, start = _training(run.parameters, run.inputs, find)
    trials = _trials(run.sweep, run.parameters, run.inputs, find)
    return replace(run, config=config, start=start, trials=trials)


def _dataset(parameters: Parameters, publish: str) -> tuple[DatasetSettings, dict[str, Any]]:
    ours, sync = split("sync", parameters.sync, *SUBJECTS["sync"])
    name = dataset_name(str(ours.get("dataset", "")), parameters.source)
    if publish and ours.setdefault("publish", publish) != publish:
        raise InputError(
            f"sync sets publish={ours['publish']!r}, but this pipeline mounts no PVC for data: "
            "leave it out, or take the pipeline train_resnet_bucket"
        )
    dataset = DatasetSettings.create(**{**ours, "dataset": name})
    check_strategy(dataset.publish, parameters.source)
    options = options_of(name, sync)
    if options.dry_run:
        raise InputError("sync sets dry_run, which syncs nothing to train on; leave it out")
    if dataset.publish == "each-node":
        sync["dry_run"] = True  # the step only lists; each pod downloads
    return dataset, sync


def _check_own_network(run: Run) -> None:
    """Raise InputError for settings that only weights of a network of one's own can have."""
    if run.own_network:
        return
    parameters = run.parameters
    useless: dict[str, Any] = {"classes": run.measuring.get("classes")}
    if parameters.checkpoint:
        useless |= {"training": parameters.training, "release": parameters.release}
    for name in filter(useless.get, useless):
        raise InputError(
            f"{name} sets {', '.join(useless[name])}, but a training, a checkpoint and a bundle "
            "have their own: leave it out, or give model, the network of the weights in checkpoint"
        )


def _sweep(parameters: Parameters, inputs: Mapping[str, Any]) -> Sweep | None:
    (fields,) = split("sweep", parameters.sweep, *SUBJECTS["sweep"])
    by_form = {"recipe": parameters.recipe, "rates": inputs.get("rates", {})}
    return Sweep.create(**fields, **by_form) if fields else None


def _trials(
    sweep: Sweep | None,
    parameters: Parameters,
    inputs: Mapping[str, Any],
    find: Finder | None = None,
) -> list[TrainConfig]:
    """Return the settings of the trials to check; empty without a sweep."""
    trials = examples_of(sweep) if sweep else []
    return [trial_config(sweep, trial, parameters, inputs, find) for trial in trials if sweep]


def trial_config(
    sweep: Sweep,
    trial: dict[str, Any],
    parameters: Parameters,
    inputs: Mapping[str, Any],
    find: Finder | None = None,
) -> TrainConfig:
    """Return the training of one trial; `find` is as in `with_weights`. Raise InputError."""
    (own,) = split("a trial of sweep", trial, TrainConfig)
    optimizer = own.get("optimizer", parameters.training.get("optimizer", "sgd"))
    try:
        return _training(parameters, inputs, find, sweep.under(str(optimizer)), own)[0]
    except InputError as error:
        raise InputError(f"the trial {json.dumps(trial)} of sweep: {error}") from None


def base_training(run: Run) -> dict[str, Any]:
    """Return the settings that the trials of a sweep override, without the recipe's."""
    boxes = set_fields(run.inputs, TrainConfig)
    boxes = {name: value for name, value in boxes.items() if name not in TrainConfig.set_by_step}
    return {**boxes, **run.parameters.training}


def training_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a training that are set, without those that only a step sets."""
    return {
        name: value
        for name, value in config.explicit().items()
        if name not in TrainConfig.set_by_step
    }


def _training(
    parameters: Parameters,
    inputs: Mapping[str, Any],
    find: Finder | None = None,
    under: Mapping[str, Any] = {},
    over: Mapping[str, Any] = {},
) -> tuple[TrainConfig, Start]:
    """Return the training, and the weights that it starts from.

    `find` is as in `with_weights`, or None to leave `pretrained` as it is; `under` has defaults
    of the settings, `over` overrides them.
    """
    boxes = set_fields(inputs, TrainConfig)
    own = dict.fromkeys(boxes, PARAMETER)
    (training,) = split("training", parameters.training, *SUBJECTS["training"], reserved=own)
    folders = {"data": data_dir(), "output_dir": work_dir()}
    fields = {**under, **boxes, **training, **over, **folders}
    config = configured(parameters.recipe, fields)
    if find is None or parameters.checkpoint:
        return config, RANDOM_START
    if not config.starts_from_weights:
        return config, RANDOM_START
    # A trial with another network may have none.
    pretrained = "auto" if config.pretrained == "true" and "model" in over else config.pretrained
    start = find(pretrained, config.model, own_image="image" in parameters.job)
    if not start:
        recipe = "none" if parameters.recipe == "finetune" else parameters.recipe
        return configured(recipe, {**fields, "pretrained": start.pretrained}), start
    fields = {**fields, "pretrained": start.pretrained}
    if start.model and not config.is_set("model"):
        fields = {"model": start.model, **fields}
    return configured(parameters.recipe, fields), start


def _job(
    parameters: Parameters, inputs: Mapping[str, Any]
) -> tuple[LaunchSpec, dict[str, Any], StepResources]:
    """Return the job of `train` without its command, its supervision, and steps' resources."""
    own = {**JOB_INTERNAL, **dict.fromkeys(("nodes", "gpus_per_node"), PARAMETER)}
    job, supervision, steps, notification = split(
        "job", parameters.job, *SUBJECTS["job"], reserved=own
    )
    Notification.create(**notification)
    Supervision.create(**supervision)
    check_backend(parameters.backend, inputs["nodes"])
    kind = "pytorchjob" if parameters.backend == "local" else parameters.backend
    fields = {"nodes": inputs["nodes"], "kind": kind, "command": ["true"]}
    if inputs["gpus_per_node"] != -1:
        fields["gpus_per_node"] = inputs["gpus_per_node"]
    spec = LaunchSpec.create(**{"image": inputs["image"], **job, **fields})
    return spec, supervision, StepResources.create(**steps)


def _gate(parameters: Parameters) -> tuple[dict[str, Any], dict[str, Any], Rules]:
    """Return the rules and their measurements; a rule that could never hold is an error."""
    gate, measuring = split("gate", parameters.gate, *SUBJECTS["gate"])
    rules = Rules.create(**gate)
    measurements = Measuring.create(**measuring)
    if parameters.checkpoint and rules.need_bundle:
        raise InputError(
            f"gate sets {rules.need_bundle[0]}, which needs a bundle, and this pipeline judges "
            "without one: leave it out"
        )
    if rules.min_slice_accuracy and not measurements.tags:
        raise InputError(
            "gate sets min_slice_accuracy, and no tags for slices: give tags too, a CSV of "
            "path and tags"
        )
    return gate, measuring, rules
