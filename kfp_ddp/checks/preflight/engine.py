"""The `preflight` step: every parameter checked, first and at once, and handed on as checked."""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.checks.preflight.claims import check_modes, mounted_at_once
from kfp_ddp.checks.preflight.evaluating import check_evaluation, evaluation
from kfp_ddp.checks.preflight.nodes import gpus_a_node, no_room, unused
from kfp_ddp.checks.preflight.parameters import LAUNCHER_ASKS, Dataset, Parameters, StepResources
from kfp_ddp.checks.preflight.released import check_release
from kfp_ddp.checks.preflight.service import check_service
from kfp_ddp.checks.preflight.settled import check_batch, exported_to, settled
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.step import step
from kfp_ddp.jobs import check_job
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.supervision import JOB_OWN
from kfp_ddp.jobs.task import check_carried
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.nodes import schedulable
from kfp_ddp.k8s.quantity import amount
from kfp_ddp.models import champion as champions
from kfp_ddp.models import initial_weights
from kfp_ddp.runs.notify import notify_of_refusal
from kfp_ddp.storage.destination import open_destination
from kfp_ddp.storage.sources import open_source
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.layout import Rule

if TYPE_CHECKING:
    from kfp import dsl


class Plan(NamedTuple):
    """What the steps that follow are given: checked, and only what was set."""

    training: dict[str, Any]
    job: dict[str, Any]
    sync: dict[str, Any]
    gate: dict[str, Any]
    measuring: dict[str, Any]
    """What the evaluation measures beside what it always does."""
    release: dict[str, Any]
    service: str
    """What the release names for a roll-out; empty for none."""
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
    evaluate_backend: str
    evaluate_job: dict[str, Any]
    """The settings of the job that evaluates, where one does."""
    gpu_resource: str
    trials: list[dict[str, Any]]
    """The training of each trial of a sweep."""


@step
@notify_of_refusal
def run(inputs: dict[str, Any]) -> Plan:
    """Check all, write what will run, and return it as the later steps take it.

    Args:
        inputs: The component's inputs by name: boxes, mappings, `image` and `plan_summary`.

    Raises:
        InputError: the first parameter that cannot be used, in the order of the steps.
    """
    found = settled(inputs)
    parameters, dataset, spec = found.parameters, found.dataset, found.spec
    config, steps, gate, champion = found.config, found.steps, found.gate, found.champion
    open_source(parameters.source)
    initial_weights.check(config.init_from)
    _check_work(parameters, spec)
    _find_champion(parameters, champion)
    if champion and champion != exported_to(parameters):
        gate["champion_must_exist"] = True  # or one that is misspelt is beaten by every model
    _check_destination(parameters)
    check_release(found.release, parameters.destination)
    service = check_service(found.release, parameters.destination)
    if parameters.checkpoint:
        warnings = _there(parameters.checkpoint)
    elif parameters.backend == "local":
        warnings = _in_this_image()
    else:
        left_open = inputs["gpus_per_node"] == -1
        data_claim = "" if inputs["publish"] else dataset.claim
        spec, warnings = _on_cluster(spec, parameters, dataset, data_claim, steps, left_open)
    check_batch(config, spec, parameters.backend)
    evaluated = evaluation(steps, spec)
    warnings += check_evaluation(
        evaluated,
        "" if inputs["publish"] else dataset.claim,
        "" if parameters.work else parameters.work_claim,
    )
    plan = Plan(
        training={n: v for n, v in config.given().items() if n not in TrainConfig.own},
        job={n: v for n, v in spec.given().items() if n not in JOB_OWN} | found.supervision,
        sync=found.sync,
        gate=gate,
        measuring=found.measuring,
        release=found.release,
        service=service,
        layout={name: getattr(config, name) for name in Rule._fields},
        dataset=dataset.dataset,
        data_claim=dataset.claim,
        publish=dataset.publish,
        champion=champion,
        **_pods(steps, spec, parameters.backend),
        **evaluated,
        trials=[
            {n: v for n, v in each.given().items() if n not in TrainConfig.own}
            for each in found.trials
        ],
    )
    what = _in_words(config, parameters.backend, spec)
    if parameters.checkpoint:
        what = f"evaluation of {parameters.checkpoint} on {parameters.split}, nothing is trained"
    _tell(inputs["plan_summary"], what, warnings, plan)
    return plan


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
    check_carried(spec.given())
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


def _pods(steps: StepResources, spec: LaunchSpec, backend: str) -> dict[str, Any]:
    """What the pods of the steps take, as KFP takes it; a launcher waits, unless it trains."""
    limits = resources(spec).get("limits", {}) if backend == "local" else {}
    named = ("sync_cpu", "sync_memory", "evaluate_cpu", "evaluate_memory")
    return {
        **{name: getattr(steps, name) for name in named},
        **{
            f"train_{name}": max(limits.get(name, least), least, key=amount)
            for name, least in LAUNCHER_ASKS.items()
        },
        "gpu_resource": spec.gpu_resource,
    }


def _find_champion(parameters: Parameters, champion: str) -> None:
    """Refuse a champion that is not there, as far as it can be seen from here.

    Raises:
        InputError: naming what to give.
    """
    own = exported_to(parameters)
    # A folder lies on a claim, which on a cluster is not mounted here.
    mounted = all(Path(folder).is_dir() for folder in (data_dir(), work_dir()))
    looked_at = champion and (mounted or open_destination(champion).remote)
    if looked_at and champions.find(champion) is None and champion != own:
        exported = f"; this run exports to {own}" if own else ""
        raise InputError(
            f"champion={champion} is not there{exported}: correct it, or give last for the model "
            "that was exported last to destination, which need not be there yet"
        )


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
