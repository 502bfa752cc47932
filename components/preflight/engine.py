"""The `preflight` step: every parameter checked, first and at once, and handed on as checked."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.base.errors import InputError
from kfp_ddp.base.folders import data_dir, work_dir
from kfp_ddp.base.settings import split
from kfp_ddp.components.data_sync.dataset import dataset_name
from kfp_ddp.components.data_sync.settings import options_of
from kfp_ddp.components.data_sync.sources import open_source
from kfp_ddp.components.dataset_volume.request import check_strategy
from kfp_ddp.components.gate.rules import Rules
from kfp_ddp.components.preflight.claims import check_modes, mounted_at_once
from kfp_ddp.components.preflight.nodes import gpus_a_node, no_room, schedulable, unused
from kfp_ddp.components.preflight.parameters import (
    LAST,
    LAUNCHER_ASKS,
    SUBJECTS,
    Dataset,
    Parameters,
    StepResources,
    filled_in,
)
from kfp_ddp.components.preflight.places import check_place
from kfp_ddp.components.preflight.sweep import Sweep, trials_of
from kfp_ddp.components.shared import champion as champions
from kfp_ddp.components.shared import initial_weights
from kfp_ddp.components.shared.bundle import check_model_name
from kfp_ddp.components.shared.cluster.api import Api, ApiError, Object
from kfp_ddp.components.shared.destination import open_destination
from kfp_ddp.components.shared.each_node import options_on_nodes
from kfp_ddp.components.shared.launch import check_job
from kfp_ddp.components.shared.launch.manifests.pod import resources
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec
from kfp_ddp.components.shared.launch.specification.quantity import amount
from kfp_ddp.components.shared.notify import Notification, refusals_told
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.train.settings import JOB_OWN, Supervision, check_backend
from kfp_ddp.training.batches import check_divides
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.layout import Rule
from kfp_ddp.training.recipes import configured

if TYPE_CHECKING:
    from kfp import dsl

BOX = "has a box of its own"


class Plan(NamedTuple):
    """What the steps that follow are given: checked, and only what was set."""

    training: dict[str, Any]
    job: dict[str, Any]
    sync: dict[str, Any]
    gate: dict[str, Any]
    layout: dict[str, Any]
    """Of the training what says where classes and splits are, for the sync."""
    dataset: str
    data_claim: str
    publish: str
    champion: str
    sync_cpu: str
    sync_memory: str
    train_cpu: str
    train_memory: str
    evaluate_cpu: str
    evaluate_memory: str
    evaluate_gpus: str
    """Empty for none: KFP's driver then leaves them out, where it fails for an empty CPU."""
    gpu_resource: str
    trials: list[dict[str, Any]]
    """The training of each trial of a sweep."""


@step
@refusals_told
def run(inputs: dict[str, Any]) -> Plan:
    """Check all, write what will run, and return it as the later steps take it.

    Args:
        inputs: The component's inputs by name: boxes, mappings, `image` and `plan_summary`.

    Raises:
        InputError: the first parameter that cannot be used, in the order of the steps.
    """
    parameters, dataset, sync, config, spec, supervision, steps, gate, champion, trials = settled(
        inputs
    )
    open_source(parameters.source)
    initial_weights.check(config.init_from)
    _check_work(parameters, spec)
    _find_champion(parameters, champion)
    if champion and champion != _exported_to(parameters):
        gate["champion_must_exist"] = True  # or one that is misspelt is beaten by every model
    _check_destination(parameters)
    if parameters.checkpoint:
        warnings = _there(parameters.checkpoint)
    elif parameters.backend == "local":
        warnings = _in_this_image()
    else:
        left_open = inputs["gpus_per_node"] == -1
        data_claim = "" if inputs["publish"] else dataset.claim
        spec, warnings = _on_cluster(spec, parameters, dataset, data_claim, steps, left_open)
    _check_batch(config, spec, parameters.backend)
    plan = Plan(
        training={n: v for n, v in config.given().items() if n not in TrainConfig.own},
        job={n: v for n, v in spec.given().items() if n not in JOB_OWN} | supervision,
        sync=sync,
        gate=gate,
        layout={name: getattr(config, name) for name in Rule._fields},
        dataset=dataset.dataset,
        data_claim=dataset.claim,
        publish=dataset.publish,
        champion=champion,
        **_pods(steps, spec, parameters.backend),
        trials=[
            {n: v for n, v in each.given().items() if n not in TrainConfig.own} for each in trials
        ],
    )
    what = _in_words(config, parameters.backend, spec)
    if parameters.checkpoint:
        what = f"evaluation of {parameters.checkpoint} on {parameters.split}, nothing is trained"
    _tell(inputs["plan_summary"], what, warnings, plan)
    return plan


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
    champion: str
    trials: list[TrainConfig]


def settled(inputs: Mapping[str, Any]) -> Settled:
    """What the inputs come to by themselves; no bucket, no cluster and no folder is looked at.

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
    (gate,) = split("gate", parameters.gate, *SUBJECTS["gate"], own={})
    champion = _champion(parameters, Rules.create(**gate))
    if inputs["gpus_per_node"] != -1 or spec.nproc_per_node:
        _check_batch(config, spec, parameters.backend)
    trials = _trials(parameters, inputs)
    return Settled(
        parameters, dataset, sync, config, spec, supervision, steps, gate, champion, trials
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


def _check_work(parameters: Parameters, spec: LaunchSpec) -> None:
    """Refuse a place of runs that cannot be written, or a job that only a claim can carry.

    Raises:
        InputError: naming what to give instead.
    """
    if not parameters.work:
        return
    where = open_destination(parameters.work)
    if not where.remote and parameters.backend != "local":
        raise InputError(
            f"work={parameters.work!r} is no bucket, which each pod could reach: give gs://, s3:// "
            "or az://, or take the pipeline train_resnet with a work claim"
        )
    for name, value, only in (
        ("elastic", spec.elastic, ""),
        ("restart_policy", spec.restart_policy, "Never"),
    ):
        if value != only:
            raise InputError(
                f"job sets {name}={value!r}, where pods come anew while others go on, and work in "
                "a bucket is fetched when a job begins: leave it out, or use a work claim"
            )
    where.prepare()


def _on_cluster(
    spec: LaunchSpec,
    parameters: Parameters,
    dataset: Dataset,
    data_claim: str,
    steps: StepResources,
    gpus_left_open: bool,
) -> tuple[LaunchSpec, list[str]]:
    """The job with the GPUs that were left open, and warnings; refused where it could not run.

    Raises:
        InputError: no GPUs where they were left open, claims that pods cannot share, and what
            check_job refuses.
    """
    api = Api.connect()
    nodes: list[Object] | ApiError
    try:
        nodes = schedulable(api)
    except ApiError as error:
        nodes = error
    if gpus_left_open and not spec.gpus():
        found = gpus_a_node(nodes, spec.gpu_resource, spec.pods())
        spec = LaunchSpec.create(**{**spec.given(), "gpus_per_node": found})
    work_claim = "" if parameters.work else parameters.work_claim
    mounts = {
        path: name for path, name in ((data_dir(), data_claim), (work_dir(), work_claim)) if name
    }
    warnings = check_job.check(api, spec.model_copy(update={"claims": {**mounts, **spec.claims}}))
    shared = mounted_at_once(spec, work_claim, data_claim, dataset.publish)
    number = None if isinstance(nodes, ApiError) else len(nodes)
    instead = {
        work_claim: "keep the runs in a bucket, by the pipeline train_resnet_bucket",
        dataset.claim: 'set sync={"publish": "clone"}',
    }
    warnings += check_modes(api, shared, instead, number, spec.pods())
    if not spec.gpus():
        warnings.append(unused(nodes, spec.gpu_resource))
    return spec, warnings + no_room(nodes, steps.by_step(spec.gpu_resource))


def _check_batch(config: TrainConfig, spec: LaunchSpec, backend: str) -> None:
    """Refuse a batch that was set and cannot be dealt among ranks whose number is known.

    Raises:
        InputError: naming a batch that can.
    """
    known = backend != "local" or spec.nproc_per_node
    if known and config.is_set("batch_size") and not config.batch_size_per_rank:
        uneven = bool(spec.elastic) and config.strategy != "fsdp"
        ranks = spec.pods() * spec.processes()
        check_divides(config.batch_size, config.micro_batch_size, ranks, uneven)


def _pods(steps: StepResources, spec: LaunchSpec, backend: str) -> dict[str, str]:
    """What the pods of the steps take, as KFP takes it; a launcher waits, unless it trains."""
    limits = resources(spec).get("limits", {}) if backend == "local" else {}
    return {
        **steps.model_dump(),
        **{
            f"train_{name}": max(limits.get(name, least), least, key=amount)
            for name, least in LAUNCHER_ASKS.items()
        },
        "evaluate_gpus": str(steps.evaluate_gpus or ""),
        "gpu_resource": spec.gpu_resource,
    }


def _champion(parameters: Parameters, rules: Rules) -> str:
    """The folder or address of the model to beat; empty for none.

    Raises:
        InputError: the rules need one, or it is the last of no destination.
    """
    champion, own = parameters.champion.rstrip("/"), _exported_to(parameters)
    if champion == LAST:
        if not own:
            raise InputError("champion=last is the last model at destination, which is empty")
        champion = own
    rules.check_champion(champion)
    return champion


def _find_champion(parameters: Parameters, champion: str) -> None:
    """Refuse a champion that is not there, as far as it can be seen from here.

    Raises:
        InputError: naming what to give.
    """
    own = _exported_to(parameters)
    # A folder lies on a claim, which on a cluster is not mounted here.
    mounted = all(Path(folder).is_dir() for folder in (data_dir(), work_dir()))
    looked_at = champion and (mounted or open_destination(champion).remote)
    if looked_at and champions.find(champion) is None and champion != own:
        exported = f"; this run exports to {own}" if own else ""
        raise InputError(
            f"champion={champion} is not there{exported}: correct it, or give last for the model "
            "that was exported last to destination, which need not be there yet"
        )


def _exported_to(parameters: Parameters) -> str:
    """The folder of this model's exports, where a first champion is still to come; '' for none."""
    where = parameters.destination.rstrip("/")
    return f"{where}/{parameters.model_name}" if where else ""


def _check_destination(parameters: Parameters) -> None:
    if parameters.destination:
        where = open_destination(parameters.destination)
        if where.remote:
            where.prepare()


def _there(checkpoint: str) -> list[str]:
    """Refuse an address where nothing lies; no warnings. A claim is not mounted here.

    Raises:
        InputError: naming it.
    """
    where = open_destination(checkpoint)
    if where.remote and next(iter(where.list("")), None) is None:
        raise InputError(f"checkpoint={checkpoint} is not there: correct the address")
    return []


def _in_this_image() -> list[str]:
    """Warnings about processes of the step itself, whose image is as a rule that of this step."""
    if not importlib.util.find_spec("torch"):
        return [
            "backend=local trains in the step's own container, and this image has no torch: use "
            "pytorchjob or trainjob, or set_container_image of the trainer on the task train"
        ]
    return []


def _in_words(config: TrainConfig, backend: str, spec: LaunchSpec) -> str:
    """What will run, in one line."""
    batch = f"batch {config.batch_size}"
    if config.batch_size_per_rank:
        batch = f"batch {config.batch_size_per_rank} a rank"
    if backend == "local":
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        where = f"local, {gpus or 'no'} GPU(s)"
    else:
        limits = resources(spec).get("limits", {})
        most = " and ".join(f"{limits.get(name, 'any')} {name}" for name in ("cpu", "memory"))
        where = (
            f"{backend} of {spec.nodes} pod(s), {spec.gpus() or 'no'} GPU(s) each, at most {most}"
        )
    return f"{config.model} at {config.image_size} px, {config.epochs} epochs, {batch}, {where}"


def _tell(summary: "dsl.Markdown", what: str, warnings: list[str], plan: Plan) -> None:
    """Print what will run, and write it with all that was set."""
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    print(what, flush=True)
    lines = [f"**{what}**", "", *(f"- warning: {warning}" for warning in warnings), ""]
    lines += ["| | Set to |", "|---|---|"]
    for subject, value in plan._asdict().items():
        settings = value.items() if isinstance(value, dict) else [("", value)]
        lines += [
            f"| {subject}{name and '.'}{name} | `{json.dumps(each)}` |"
            for name, each in settings
            if each != ""
        ]
    summary.metadata["what"] = what
    Path(summary.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
