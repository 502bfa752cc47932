"""The `preflight` step: check a run before it starts, and return its plan."""

import importlib.util
import json
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.checks.claims import check_modes, mounted_at_once
from kfp_ddp.checks.nodes import check_on_cpus, cpu_warning, gpus_per_node, too_large, unfit
from kfp_ddp.checks.operators import check_service
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.folders import data_dir, work_dir
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import PreflightFacts
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.core.text import plural
from kfp_ddp.jobs import check_job
from kfp_ddp.jobs.kinds.pod import resources, scheduling
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL, SET_BY_STEP, LaunchSpec
from kfp_ddp.jobs.task import check_bucket_training
from kfp_ddp.k8s.api import COMPUTE_HERE, LAUNCHER, Api, ApiError, Object, schedulable_nodes
from kfp_ddp.k8s.objects import parse_quantity
from kfp_ddp.models import champion as champions
from kfp_ddp.models import weights_download
from kfp_ddp.models.registry import registry_of
from kfp_ddp.models.release import Deployment, Registering, Signing, part_of
from kfp_ddp.models.signature import key_of, signer_of
from kfp_ddp.plan.choice import count_gpus
from kfp_ddp.plan.form import EVALUATE_REQUESTS, LAUNCHER_REQUESTS, StepResources
from kfp_ddp.plan.settings import Run, base_training, parse, training_fields, with_weights
from kfp_ddp.plan.sizing import sized
from kfp_ddp.runs.notify import notify_of_refusal
from kfp_ddp.storage.kinds import open_source, open_store
from kfp_ddp.storage.store import Store
from kfp_ddp.training.spec.time_spent import price_on

TRAINING_SIZE = frozenset(
    ("nodes", "gpus_per_node", "nproc_per_node", "cpu", "memory", "cpu_request", "memory_request")
) | {"resources"}
"""Settings that size the training job; the others also apply to the evaluation job."""


@step
@notify_of_refusal
def run(inputs: dict[str, Any]) -> Any:
    """Check all settings, write a summary, and return the outputs as a named tuple.

    InputError: a parameter cannot be used; the first one in the order of the steps.
    """
    settings = with_price(parse(inputs))
    warnings: list[str] = []
    for check in CHECKS:
        warnings += check(settings) or []
    warnings = [f"warning: {warning}" for warning in warnings]
    settings, notes = sized(settings)
    settings = with_weights(settings, weights_download.find)
    if settings.start.origin:
        notes.append(settings.start.origin)
    plan = _plan(settings)
    _write_summary(inputs["plan_summary"], title(settings), [*notes, *warnings], plan)
    return namedtuple("Plan", plan)(**plan)


def with_price(run: Run) -> Run:
    """Return the run with the price of a GPU-hour on the nodes of its job, where that is known."""
    prices = run.supervision.get("prices", {})
    training = run.inputs.get("training", {})
    if not prices or "gpu_hour_price" in training:
        return run
    if run.parameters.backend == "local":
        return run
    selector = run.spec.node_selector
    try:
        labels = [_labels(node) for node in schedulable_nodes(Api.connect())]
    except ApiError:
        labels = []
    suitable = [node for node in labels if selector.items() <= node.items()]
    price = price_on(suitable or [selector], prices)
    return parse({**run.inputs, "training": {**training, "gpu_hour_price": price}})


def _plan(run: Run) -> dict[str, Any]:
    """Return the outputs: the checked settings of the later steps, only those that are set.

    Resources are text. evaluate_gpus is empty for none: KFP's driver then omits GPUs, but it fails
    for an empty CPU.
    """
    gate = dict(run.gate)
    if run.champion and run.champion != run.parameters.exports:
        gate["champion_must_exist"] = True  # every model beats a champion with a mistyped URI
    measuring = run.measuring
    if run.own_network:
        measuring = {**measuring, "network": training_fields(run.config)}
    # A launcher needs little, unless it runs the ranks.
    limits = resources(run.spec).get("limits", {}) if run.parameters.backend == "local" else {}
    names = ("sync_cpu", "sync_memory", "evaluate_cpu", "evaluate_memory")
    job = {name: value for name, value in run.spec.explicit().items() if name not in JOB_INTERNAL}
    return dict(
        training=base_training(run) if run.sweep else training_fields(run.config),
        job={**job, **run.supervision},
        sync=run.sync,
        gate=gate,
        measuring=measuring,
        release=run.release,
        service=part_of(run.release, Deployment).service,
        layout=run.config.layout_rule._asdict(),
        dataset=run.dataset.dataset,
        data_claim=run.dataset.claim,
        publish=run.dataset.publish,
        champion=run.champion,
        **{name: getattr(run.steps, name) for name in names},
        **{
            f"train_{name}": max(limits.get(name, least), least, key=parse_quantity)
            for name, least in LAUNCHER_REQUESTS.items()
        },
        train_token=token_of(run.parameters.backend),
        **evaluation(run.steps, run.spec),
        evaluate_token=token_of(run.steps.evaluate_backend),
        gpu_resource=run.spec.gpu_resource,
        sweep=run.sweep.explicit() if run.sweep else {},
    )


NO_TOKEN = "kfp-ddp-no-token"  # noqa: S105
"""A Secret that does not exist: KFP refuses an empty name."""


def token_of(backend: str) -> str:
    """Return the Secret with the token of a step, which has none if it computes itself."""
    return NO_TOKEN if backend == "local" else LAUNCHER


def evaluation(steps: StepResources, spec: LaunchSpec) -> dict[str, Any]:
    """Return backend, job settings and GPUs of the evaluation; `spec` is the training job."""
    backend = steps.evaluate_backend
    gpus = steps.evaluate_gpus
    if backend == "local":
        return {"evaluate_backend": backend, "evaluate_job": {}, "evaluate_gpus": str(gpus or "")}
    excluded = TRAINING_SIZE | set(SET_BY_STEP)
    job = {name: value for name, value in spec.explicit().items() if name not in excluded}
    job |= {"nodes": steps.evaluate_nodes, "gpus_per_node": gpus}
    for name, least in EVALUATE_REQUESTS.items():
        job |= {name: getattr(steps, f"evaluate_{name}"), f"{name}_request": least}
    return {"evaluate_backend": backend, "evaluate_job": job, "evaluate_gpus": ""}


def check_source(run: Run) -> None:
    """Check that the source has a supported kind, and that the initial weights exist."""
    open_source(run.parameters.source)
    weights_download.check(run.config.pretrained)


def check_work(run: Run) -> None:
    """Check that the runs' prefix can be written, and that the job needs no PVC for runs."""
    work = run.parameters.work
    if work:
        store = open_store(work)
        if not store.remote and run.parameters.backend != "local":
            raise InputError(
                f"work={work!r} is not a bucket, which each pod could access: give gs://, s3:// "
                "or az://, or take the pipeline train_resnet with a work claim"
            )
        check_bucket_training(run.spec.explicit())
        store.prepare()


def check_champion(run: Run, here: bool = False) -> None:
    """Check the key of the champion, and the champion, if this step can see it.

    `here`: on this machine.
    """
    signer = signer_of(run.gate.get("champion_key", ""), "champion_key")
    champion = run.champion
    own = run.parameters.exports
    visible = champion and (here or _can_see(open_store(champion)))
    missing = visible and champions.find(champion, signer=signer) is None
    # Its own exports may still be missing, in the first run.
    if missing and champion != own:
        exported = f"; this run exports to {own}" if own else ""
        raise InputError(
            f"champion={champion} is not found{exported}: correct it, or give last for the model "
            "that was exported last to destination, which may still be missing"
        )


def _can_see(store: Store) -> bool:
    """Return whether this step has a store: a folder is on a PVC, which no pod has mounted here."""
    return store.remote or all(Path(folder).is_dir() for folder in (data_dir(), work_dir()))


def check_release(release: Mapping[str, Any], where: Store | None) -> None:
    """Check the signing key and the access to the model registry: InputError or StorageError."""
    key_of(part_of(release, Signing))
    registry = registry_of(part_of(release, Registering), where)
    if registry is None:
        return
    if where is None:
        raise InputError(
            f"release names the registry {registry.address}, and no destination: it records the "
            "URI of a bundle, so give destination too"
        )
    registry.check()


def check_publishing(run: Run) -> None:
    """Check that a destination can be written, the release, and the service; creates a folder."""
    destination = run.parameters.destination
    where = None
    if destination:
        where = open_store(destination)
        if _can_see(where):
            where.prepare()
    check_release(run.release, where)
    check_service(run.release, destination)


def check_backend(run: Run) -> list[str]:
    """Check the checkpoint to evaluate, this image, or the cluster: where the run computes."""
    if run.parameters.checkpoint:
        _check_checkpoint(run.parameters.checkpoint, is_file=run.own_network)
        return []
    if run.parameters.backend != "local":
        return _check_cluster(run)
    if importlib.util.find_spec("torch"):
        return []
    return [
        "backend=local trains in the step's own container, and this image has no torch: use "
        "pytorchjob or trainjob, or set_container_image of the trainer on the task train"
    ]


def _check_checkpoint(uri: str, is_file: bool) -> None:
    """Raise InputError for a checkpoint that is missing in a bucket; no pod sees a folder here.

    It may be the file of weights with `is_file`.
    """
    store = open_store(uri)
    if not store.remote or store.has_files():
        return
    folder, _, name = uri.rpartition("/")
    if not is_file or not open_store(folder).exists(name):
        raise InputError(f"checkpoint={uri} is not found: correct the URI")


def _check_cluster(run: Run) -> list[str]:
    """Return warnings about the job, or raise InputError; sets GPUs that the form leaves open."""
    api = Api.connect(otherwise=COMPUTE_HERE)
    nodes: list[Object] | ApiError
    suitable: list[Object] | ApiError
    try:
        nodes = schedulable_nodes(api)
        suitable = _selected(nodes, run.spec)
    except ApiError as error:
        nodes = error
        suitable = error
    if run.inputs["gpus_per_node"] == -1 and not run.spec.gpus():
        gpus = gpus_per_node(suitable, run.spec.gpu_resource, run.spec.nodes)
        run.spec = LaunchSpec.create(**{**run.spec.explicit(), "gpus_per_node": gpus})
    spec = run.spec
    claims = {**run.mounts, **spec.claims}
    warnings = check_job.check(api, spec.model_copy(update={"claims": claims}))
    warnings += _mode_warnings(api, run, None if isinstance(nodes, ApiError) else len(nodes))
    if not spec.gpus():
        check_on_cpus(run.config)
        warnings.append(cpu_warning(nodes, spec.gpu_resource))
    uses_gpus = spec.gpus() or run.steps.evaluate_gpus
    # Only our own images are known to have CUDA.
    if uses_gpus and "image" not in run.parameters.job:
        warnings += unfit(suitable, spec.gpu_resource)
    return warnings + too_large(nodes, run.steps.requests_by_step(spec.gpu_resource))


def _selected(nodes: list[Object], spec: LaunchSpec) -> list[Object]:
    """Return the nodes that the job's selector admits."""
    selector = scheduling(spec).get("nodeSelector", {})
    return [node for node in nodes if selector.items() <= _labels(node).items()]


def _labels(node: Object) -> dict[str, str]:
    labels: dict[str, str] = node["metadata"].get("labels") or {}
    return labels


def _mode_warnings(api: Api, run: Run, nodes: int | None) -> list[str]:
    """Check that all pods can mount the PVCs of the run at once."""
    work = run.mounts.get(work_dir(), "")
    data = run.mounts.get(data_dir(), "")
    instead = {
        work: "keep the runs in a bucket, by the pipeline train_resnet_bucket",
        run.dataset.claim: 'set sync={"publish": "clone"}',
    }
    shared = mounted_at_once(run.spec, work, data, run.dataset.publish)
    return check_modes(api, shared, instead, nodes, run.spec.nodes)


def check_evaluation(run: Run) -> list[str]:
    """Check that the ranks can divide the batch, and the evaluation job, if there is one."""
    run.check_batch()
    outputs = evaluation(run.steps, run.spec)
    if outputs["evaluate_backend"] == "local":
        return []
    fields = {**outputs["evaluate_job"], "kind": outputs["evaluate_backend"], "command": ["true"]}
    fields["claims"] = {**run.mounts, **fields.get("claims", {})}
    return check_job.check(Api.connect(otherwise=COMPUTE_HERE), LaunchSpec.create(**fields))


CHECKS: tuple[Callable[[Run], list[str] | None], ...] = (
    *(check_source, check_work, check_publishing, check_champion),
    *(check_backend, check_evaluation),
)
"""In the order of the steps; each may return warnings, or raise InputError."""


def title(run: Run, gpus: str = "no GPU") -> str:
    """Return what will run, in one line; `gpus` is printed if the number of GPUs is not known."""
    config = run.config
    parameters = run.parameters
    if parameters.checkpoint:
        return f"evaluation of {parameters.checkpoint} on {parameters.split}, nothing is trained"
    batch = f"batch {config.batch_size}"
    if config.batch_size_per_rank:
        batch = f"batch {config.batch_size_per_rank} a rank"
    where = _place(run, gpus)
    epochs = plural(config.epochs, "epoch")
    if parameters.recipe == "auto" and not config.script:
        parts = {"model": config.model, "epochs": epochs, "batch_size": batch}
        given = [part for name, part in parts.items() if config.is_set(name)]
        what = ", ".join(given) or "a network"
        return f"{what} with settings by images and hardware, {where}"
    return f"{config.model} at {config.image_size} px, {epochs}, {batch}, {where}"


def _place(run: Run, gpus: str) -> str:
    """Return where a run trains, and on what."""
    if run.parameters.backend == "local":
        number = count_gpus()
        return f"local, {plural(number, 'GPU') if number else gpus}"
    limits = resources(run.spec).get("limits", {})
    most = " and ".join(f"{limits.get(name, 'any')} {name}" for name in ("cpu", "memory"))
    if run.spec.gpus():
        gpus = plural(run.spec.gpus(), "GPU")
    pods = plural(run.spec.nodes, "pod")
    return f"{run.parameters.backend} of {pods}, {gpus} each, at most {most}"


def _write_summary(
    summary: Artifact, title: str, notes: list[str], plan: Mapping[str, Any]
) -> None:
    log.info("\n".join([*notes, title]))
    lines = [f"**{title}**", "", *(f"- {note}" for note in notes), ""]
    lines += ["| | Set to |", "|---|---|"]
    for subject, value in plan.items():
        settings = value if isinstance(value, dict) else {"": value}
        for name, setting in settings.items():
            if setting != "":
                setting_name = f"{subject}.{name}" if name else subject
                lines.append(f"| {setting_name} | `{json.dumps(setting)}` |")
    write_artifact(summary, "\n".join(lines) + "\n", **PreflightFacts(what=title))
