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
from kfp_ddp.components.preflight.gpus import gpus_of_nodes
from kfp_ddp.components.preflight.parameters import (
    LAST,
    SUBJECTS,
    Dataset,
    Parameters,
    filled_in,
)
from kfp_ddp.components.shared import champion as champions
from kfp_ddp.components.shared.bundle import check_model_name
from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.destination import Bucket, open_destination
from kfp_ddp.components.shared.launch import check_job
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.train.settings import JOB_OWN, Supervision, check_backend
from kfp_ddp.training.config import TrainConfig
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
    dataset: str
    data_claim: str
    publish: str
    champion: str


@step
def run(inputs: dict[str, Any]) -> Plan:
    """Check all, write what will run, and return it as the later steps take it.

    Args:
        inputs: The component's inputs by name: boxes, mappings, `image` and `summary`.

    Raises:
        InputError: the first parameter that cannot be used, in the order of the steps.
    """
    given = {name: inputs[name] for name in Parameters.model_fields if name in inputs}
    parameters = Parameters.create(**given)
    open_source(parameters.source)
    dataset, sync = _dataset(parameters)
    config = _training(parameters, inputs)
    spec, supervision = _job(parameters, inputs)
    (gate,) = split("gate", parameters.gate, *SUBJECTS["gate"], own={})
    champion = _champion(parameters, Rules.create(**gate))
    _check_destination(parameters)
    if parameters.backend == "local":
        warnings = _in_this_image()
    else:
        api = Api.connect()
        if inputs["gpus_per_node"] < 0 and not spec.gpus():
            found = gpus_of_nodes(api, spec.gpu_resource, spec.nodes)
            spec = LaunchSpec.create(**{**spec.given(), "gpus_per_node": found})
        mounts = {data_dir(): dataset.claim, work_dir(): parameters.work_claim, **spec.claims}
        warnings = check_job.check(api, spec.model_copy(update={"claims": mounts}))
        if not spec.gpus():
            warnings.append("no GPU is asked for (gpus_per_node=0): this trains on CPUs")
    plan = Plan(
        training={n: v for n, v in config.given().items() if n not in TrainConfig.own},
        job={n: v for n, v in spec.given().items() if n not in JOB_OWN} | supervision,
        sync=sync,
        gate=gate,
        dataset=dataset.dataset,
        data_claim=dataset.claim,
        publish=dataset.publish,
        champion=champion,
    )
    what = _in_words(config, parameters.backend, spec)
    _tell(inputs["summary"], what, warnings, plan)
    return plan


def _dataset(parameters: Parameters) -> tuple[Dataset, dict[str, Any]]:
    """The dataset with its name, and the options of its sync, refused where nothing would be left.

    Raises:
        InputError: naming the setting.
    """
    ours, sync = split("sync", parameters.sync, *SUBJECTS["sync"], own={})
    name = dataset_name(str(ours.get("dataset", "")), parameters.source)
    dataset = Dataset.create(**{**ours, "dataset": name})
    check_strategy(dataset.publish, parameters.source)
    options = options_of(name, sync)
    if options.dry_run:
        raise InputError("sync sets dry_run, which leaves nothing to train on; leave it out")
    if options.pack != "none":
        raise InputError(f"sync sets pack to {options.pack!r}; training reads files, leave it out")
    return dataset, sync


def _training(parameters: Parameters, inputs: Mapping[str, Any]) -> TrainConfig:
    """The training, with folders that its step will set.

    Raises:
        InputError: naming the setting.
    """
    own = {name: BOX for name in inputs if name in TrainConfig.model_fields}
    (training,) = split("training", parameters.training, *SUBJECTS["training"], own=own)
    folders = {"data": data_dir(), "output_dir": work_dir()}
    given = {**filled_in(inputs, TrainConfig), **training, **folders}
    return configured(parameters.recipe, given)


def _job(parameters: Parameters, inputs: Mapping[str, Any]) -> tuple[LaunchSpec, dict[str, Any]]:
    """The job that `train` creates, but for its command, and how it is watched.

    Raises:
        InputError: naming the setting.
    """
    own = {**JOB_OWN, **dict.fromkeys(("nodes", "gpus_per_node"), BOX)}
    job, supervision = split("job", parameters.job, *SUBJECTS["job"], own=own)
    Supervision.create(**supervision)
    check_backend(parameters.backend, inputs["nodes"])
    kind = "pytorchjob" if parameters.backend == "local" else parameters.backend
    boxes = {"nodes": inputs["nodes"], "kind": kind, "command": ["true"]}
    if inputs["gpus_per_node"] != -1:
        boxes["gpus_per_node"] = inputs["gpus_per_node"]
    return LaunchSpec.create(**{"image": inputs["image"], **job, **boxes}), supervision


def _champion(parameters: Parameters, rules: Rules) -> str:
    """The folder or address of the model to beat; empty for none.

    Raises:
        InputError: it cannot be read, or the rules need one.
    """
    champion = parameters.champion
    if champion == LAST:
        if not parameters.destination:
            raise InputError("champion=last is the last model at destination, which is empty")
        champion = f"{parameters.destination.rstrip('/')}/{parameters.model_name}"
    rules.check_champion(champion)
    # A folder lies on a claim, which on a cluster is not mounted here.
    mounted = all(Path(folder).is_dir() for folder in (data_dir(), work_dir()))
    if champion and (mounted or isinstance(open_destination(champion), Bucket)):
        champions.find(champion)
    return champion


def _check_destination(parameters: Parameters) -> None:
    check_model_name(parameters.model_name)
    if parameters.destination:
        where = open_destination(parameters.destination)
        if isinstance(where, Bucket):
            where.prepare()


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
        where = f"{backend} of {spec.nodes} pod(s), {spec.gpus() or 'no'} GPU(s) each"
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
