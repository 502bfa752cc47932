"""The `preflight` step: check a run before it starts, and return its plan."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.checks.claims import check_modes, mounted_at_once
from kfp_ddp.checks.finding import Check, Finding, run_checks
from kfp_ddp.checks.form import EVALUATE_ASKS, LAUNCHER_ASKS, Parameters, StepResources
from kfp_ddp.checks.nodes import cpu_warning, gpus_per_node, too_large
from kfp_ddp.checks.operators import check_service
from kfp_ddp.checks.settings import RunSettings, check_batch, exported_to, parse
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.step import step
from kfp_ddp.evaluation.engine import JOB_OWN as EVALUATION_OWN
from kfp_ddp.jobs import check_job
from kfp_ddp.jobs.kinds.pod import resources
from kfp_ddp.jobs.launch_spec import JOB_OWN, LaunchSpec
from kfp_ddp.jobs.task import check_carried
from kfp_ddp.k8s.api import Api, ApiError, Object
from kfp_ddp.k8s.nodes import schedulable
from kfp_ddp.k8s.quantity import amount
from kfp_ddp.models import champion as champions
from kfp_ddp.models import initial_weights
from kfp_ddp.models.registry import registry_of
from kfp_ddp.models.release import Deployment, Registering, Signing, part_of
from kfp_ddp.models.signature import key_of
from kfp_ddp.runs.notify import notify_of_refusal
from kfp_ddp.storage.kinds import open_source, open_store
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.layout import Rule

if TYPE_CHECKING:
    from kfp import dsl

TRAINING_SIZE = frozenset(
    ("nodes", "gpus_per_node", "nproc_per_node", "cpu", "memory", "cpu_request", "memory_request")
) | {"resources"}
"""Settings that size the training job; the others also apply to the evaluation job."""


class Plan(NamedTuple):
    """Outputs of preflight: the checked settings of the later steps, only those that are set."""

    training: dict[str, Any]
    job: dict[str, Any]
    sync: dict[str, Any]
    gate: dict[str, Any]
    measuring: dict[str, Any]
    """Optional measurements of the evaluation."""
    release: dict[str, Any]
    service: str
    """InferenceService for the roll-out; empty for none."""
    layout: dict[str, Any]
    """Settings of the training that define classes and splits, for the sync."""
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
    """Empty for none: KFP's driver then omits GPUs, but it fails for an empty CPU."""
    evaluate_backend: str
    evaluate_job: dict[str, Any]
    """Settings of the evaluation job, if there is one."""
    gpu_resource: str
    trials: list[dict[str, Any]]
    """Settings of the training of each trial of a sweep."""


@dataclass
class Run:
    """The run that the checks look at; a check of the cluster may set the GPUs of its job."""

    inputs: Mapping[str, Any]
    settings: RunSettings
    spec: LaunchSpec

    @property
    def parameters(self) -> Parameters:
        """Settings of the run as a whole."""
        return self.settings.parameters

    @property
    def mounts(self) -> dict[str, str]:
        """Mounted PVC by path."""
        data = "" if self.inputs["publish"] else self.settings.dataset.claim
        work = "" if self.parameters.work else self.parameters.work_claim
        return {path: name for path, name in ((data_dir(), data), (work_dir(), work)) if name}


@step
@notify_of_refusal
def run(inputs: dict[str, Any]) -> Plan:
    """Check all settings, write a summary, and return the plan.

    Args:
        inputs: Inputs of the component by name, with `plan_summary`.

    Raises:
        InputError: A parameter cannot be used; the first one in the order of the steps.
    """
    settings = parse(inputs)
    subject = Run(inputs, settings, settings.spec)
    warnings = [finding.message for finding in run_checks(CHECKS, subject)]
    plan = make_plan(subject)
    _write_summary(inputs["plan_summary"], _title(subject), warnings, plan)
    return plan


def make_plan(subject: Run) -> Plan:
    """Return the settings of the later steps."""
    settings, spec, parameters = subject.settings, subject.spec, subject.parameters
    gate = dict(settings.gate)
    if settings.champion and settings.champion != exported_to(parameters):
        gate["champion_must_exist"] = True  # every model beats a champion with a mistyped URI
    return Plan(
        training=_training(settings.config),
        job={n: v for n, v in spec.given().items() if n not in JOB_OWN} | settings.supervision,
        sync=settings.sync,
        gate=gate,
        measuring=settings.measuring,
        release=settings.release,
        service=part_of(settings.release, Deployment).service,
        layout={name: getattr(settings.config, name) for name in Rule._fields},
        dataset=settings.dataset.dataset,
        data_claim=settings.dataset.claim,
        publish=settings.dataset.publish,
        champion=settings.champion,
        **_resources(settings.steps, spec, parameters.backend),
        **evaluation(settings.steps, spec),
        trials=[_training(trial) for trial in settings.trials],
    )


def _training(config: TrainConfig) -> dict[str, Any]:
    return {name: v for name, v in config.given().items() if name not in TrainConfig.own}


def _resources(steps: StepResources, spec: LaunchSpec, backend: str) -> dict[str, Any]:
    """Return the limits of the steps; a launcher needs little, unless it runs the ranks."""
    limits = resources(spec).get("limits", {}) if backend == "local" else {}
    names = ("sync_cpu", "sync_memory", "evaluate_cpu", "evaluate_memory")
    return {
        **{name: getattr(steps, name) for name in names},
        **{
            f"train_{name}": max(limits.get(name, least), least, key=amount)
            for name, least in LAUNCHER_ASKS.items()
        },
        "gpu_resource": spec.gpu_resource,
    }


def evaluation(steps: StepResources, spec: LaunchSpec) -> dict[str, Any]:
    """Return backend, job settings and GPUs of the evaluation.

    Args:
        steps: Settings of the steps.
        spec: The training job.
    """
    backend, gpus = steps.evaluate_backend, steps.evaluate_gpus
    if backend == "local":
        return {"evaluate_backend": backend, "evaluate_job": {}, "evaluate_gpus": str(gpus or "")}
    excluded = TRAINING_SIZE | set(EVALUATION_OWN)
    job = {name: value for name, value in spec.given().items() if name not in excluded}
    job |= {"nodes": steps.evaluate_nodes, "gpus_per_node": gpus}
    for name, least in EVALUATE_ASKS.items():
        job |= {name: getattr(steps, f"evaluate_{name}"), f"{name}_request": least}
    return {"evaluate_backend": backend, "evaluate_job": job, "evaluate_gpus": ""}


def check_source(subject: Run) -> list[Finding]:
    """Check that the source has a supported kind."""
    open_source(subject.parameters.source)
    return []


def check_weights(subject: Run) -> list[Finding]:
    """Check that the initial weights exist."""
    initial_weights.check(subject.settings.config.init_from)
    return []


def check_work(subject: Run) -> list[Finding]:
    """Check that the runs' prefix can be written, and that the job needs no PVC for runs.

    Raises:
        InputError: It cannot, or the job does.
    """
    work = subject.parameters.work
    if work:
        destination = open_store(work)
        if not destination.remote and subject.parameters.backend != "local":
            raise InputError(
                f"work={work!r} is not a bucket, which each pod could access: give gs://, s3:// "
                "or az://, or take the pipeline train_resnet with a work claim"
            )
        check_carried(subject.spec.given())
        destination.prepare()
    return []


def check_champion(subject: Run) -> list[Finding]:
    """Check that the champion exists, if it can be seen from this step.

    Raises:
        InputError: It does not exist.
    """
    champion, own = subject.settings.champion, exported_to(subject.parameters)
    # A folder is on a PVC, which on a cluster is not mounted here.
    mounted = all(Path(folder).is_dir() for folder in (data_dir(), work_dir()))
    visible = champion and (mounted or open_store(champion).remote)
    if visible and champions.find(champion) is None and champion != own:
        exported = f"; this run exports to {own}" if own else ""
        raise InputError(
            f"champion={champion} is not found{exported}: correct it, or give last for the model "
            "that was exported last to destination, which may still be missing"
        )
    return []


def check_destination(subject: Run) -> list[Finding]:
    """Check that a remote destination can be written."""
    if subject.parameters.destination:
        destination = open_store(subject.parameters.destination)
        if destination.remote:
            destination.prepare()
    return []


def check_release(release: Mapping[str, Any], destination: str) -> None:
    """Check the signing key, and the access to the model registry.

    Args:
        release: Settings of the release by name.
        destination: URI that bundles are uploaded to.

    Raises:
        InputError: A key or token is missing or invalid, or there is no destination.
        StorageError: The registry does not answer.
    """
    key_of(part_of(release, Signing))
    registry = registry_of(part_of(release, Registering))
    if registry is None:
        return
    if not destination:
        raise InputError(
            f"release names the registry {registry.address}, and no destination: it records the "
            "URI of a bundle, so give destination too"
        )
    registry.check()


def check_publishing(subject: Run) -> list[Finding]:
    """Check the release and the service for a roll-out."""
    check_release(subject.settings.release, subject.parameters.destination)
    check_service(subject.settings.release, subject.parameters.destination)
    return []


def check_backend(subject: Run) -> list[Finding]:
    """Check the checkpoint to evaluate, this image, or the cluster: where the run computes."""
    if subject.parameters.checkpoint:
        warnings = _checkpoint_exists(subject.parameters.checkpoint)
    elif subject.parameters.backend == "local":
        warnings = _image_has_torch()
    else:
        warnings = _check_cluster(subject)
    return [Finding("warn", "backend", warning) for warning in warnings]


def _checkpoint_exists(checkpoint: str) -> list[str]:
    destination = open_store(checkpoint)
    if destination.remote and not destination.has_files():
        raise InputError(f"checkpoint={checkpoint} is not found: correct the URI")
    return []


def _image_has_torch() -> list[str]:
    """Return a warning if this image lacks torch; the step of a local training usually has it."""
    if not importlib.util.find_spec("torch"):
        return [
            "backend=local trains in the step's own container, and this image has no torch: use "
            "pytorchjob or trainjob, or set_container_image of the trainer on the task train"
        ]
    return []


def _check_cluster(subject: Run) -> list[str]:
    """Return warnings about the job; sets GPUs that the form leaves open.

    Raises:
        InputError: No node has GPUs, pods cannot share a PVC, or the job is rejected.
    """
    api, settings, mounts = Api.connect(), subject.settings, subject.mounts
    nodes: list[Object] | ApiError
    try:
        nodes = schedulable(api)
    except ApiError as error:
        nodes = error
    if subject.inputs["gpus_per_node"] == -1 and not subject.spec.gpus():
        gpus = gpus_per_node(nodes, subject.spec.gpu_resource, subject.spec.pods())
        subject.spec = LaunchSpec.create(**{**subject.spec.given(), "gpus_per_node": gpus})
    spec = subject.spec
    warnings = check_job.check(api, spec.model_copy(update={"claims": {**mounts, **spec.claims}}))
    work, data = mounts.get(work_dir(), ""), mounts.get(data_dir(), "")
    instead = {
        work: "keep the runs in a bucket, by the pipeline train_resnet_bucket",
        settings.dataset.claim: 'set sync={"publish": "clone"}',
    }
    shared = mounted_at_once(spec, work, data, settings.dataset.publish)
    number = None if isinstance(nodes, ApiError) else len(nodes)
    warnings += check_modes(api, shared, instead, number, spec.pods())
    if not spec.gpus():
        warnings.append(cpu_warning(nodes, spec.gpu_resource))
    return warnings + too_large(nodes, settings.steps.by_step(spec.gpu_resource))


def check_ranks(subject: Run) -> list[Finding]:
    """Check that the batch can be divided among the ranks."""
    check_batch(subject.settings.config, subject.spec, subject.parameters.backend)
    return []


def check_evaluation(subject: Run) -> list[Finding]:
    """Check the evaluation job, if there is one."""
    outputs = evaluation(subject.settings.steps, subject.spec)
    if outputs["evaluate_backend"] == "local":
        return []
    fields = {**outputs["evaluate_job"], "kind": outputs["evaluate_backend"], "command": ["true"]}
    fields["claims"] = {**subject.mounts, **fields.get("claims", {})}
    warnings = check_job.check(Api.connect(), LaunchSpec.create(**fields))
    return [Finding("warn", "evaluation", warning) for warning in warnings]


CHECKS: tuple[Check[Run], ...] = (
    Check("source", check_source),
    Check("initial weights", check_weights),
    Check("work", check_work),
    Check("champion", check_champion),
    Check("destination", check_destination),
    Check("release", check_publishing),
    Check("backend", check_backend),
    Check("batch", check_ranks),
    Check("evaluation", check_evaluation),
)


def _title(subject: Run) -> str:
    """Return what will run, in one line."""
    config, spec, parameters = subject.settings.config, subject.spec, subject.parameters
    if parameters.checkpoint:
        return f"evaluation of {parameters.checkpoint} on {parameters.split}, nothing is trained"
    batch = f"batch {config.batch_size}"
    if config.batch_size_per_rank:
        batch = f"batch {config.batch_size_per_rank} a rank"
    if parameters.backend == "local":
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        where = f"local, {gpus or 'no'} GPU(s)"
    else:
        limits = resources(spec).get("limits", {})
        most = " and ".join(f"{limits.get(name, 'any')} {name}" for name in ("cpu", "memory"))
        where = (
            f"{parameters.backend} of {spec.nodes} pod(s), {spec.gpus() or 'no'} GPU(s) each, "
            f"at most {most}"
        )
    return f"{config.model} at {config.image_size} px, {config.epochs} epochs, {batch}, {where}"


def _write_summary(summary: "dsl.Markdown", title: str, warnings: list[str], plan: Plan) -> None:
    """Print and write what will run, with all settings."""
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    print(title, flush=True)
    lines = [f"**{title}**", "", *(f"- warning: {warning}" for warning in warnings), ""]
    lines += ["| | Set to |", "|---|---|"]
    for subject, value in plan._asdict().items():
        settings = value.items() if isinstance(value, dict) else [("", value)]
        lines += [
            f"| {subject}{name and '.'}{name} | `{json.dumps(setting)}` |"
            for name, setting in settings
            if setting != ""
        ]
    summary.metadata["what"] = title
    Path(summary.path).write_text("\n".join(lines) + "\n", encoding="utf-8")
