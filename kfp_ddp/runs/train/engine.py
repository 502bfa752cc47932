"""The `train` step: check the input, start and follow the ranks, write the artifacts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.core import folders
from kfp_ddp.core.errors import InputError, JobError, RunCancelledError
from kfp_ddp.core.folders import is_per_node, is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.outputs import TrainFigures
from kfp_ddp.core.run_folder import MLFLOW, RunFolder, task_title
from kfp_ddp.core.settings import mapping_of, split
from kfp_ddp.core.step import step, write_artifact, write_job
from kfp_ddp.core.text import unexpanded
from kfp_ddp.datasets.access import using
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL, LaunchSpec, Supervision, check_backend
from kfp_ddp.jobs.local import local_gpus, run_ranks
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.shipping.own_package import on_workers
from kfp_ddp.jobs.task import check_bucket_training, claim_of, with_folders, with_task_config
from kfp_ddp.k8s.api import COMPUTE_HERE, Api
from kfp_ddp.k8s.pods import record_images
from kfp_ddp.report import training_page
from kfp_ddp.report.events import is_number
from kfp_ddp.runs.record import chosen_checkpoint, newest_checkpoint
from kfp_ddp.runs.training_folder import followed_folder, with_local_folders, with_local_weights
from kfp_ddp.runs.workspace import create_run_folder
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.report.trackers import run_of_step
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import Manifest
from kfp_ddp.training.spec.metrics import read_events
from kfp_ddp.training.spec.shared_memory import size_of_pod


class Trained(NamedTuple):
    """Outputs of the step: folder of the newest checkpoint, and folder of the run."""

    checkpoint: str
    run_dir: str


class Finished(NamedTuple):
    """A finished training."""

    run_dir: Path
    """Its folder, or the local copy of what a step needs of it."""
    place: str
    """Path or URI of the folder for other steps."""
    claim: str
    """PVC of the folder; '' for none."""
    record: dict[str, Any]
    """The job, or the settings of a training in this process."""

    def chosen(self) -> tuple[Manifest, str]:
        """Return the checkpoint for other steps, and its path or URI; JobError if there is none."""
        newest = chosen_checkpoint(self.run_dir)
        folder = RunFolder(self.run_dir).checkpoints
        if newest is None:
            raise JobError(
                f"training ended without a checkpoint in {folder}; see the log of the ranks above"
            )
        return newest, f"{self.place}/{newest.path.relative_to(self.run_dir).as_posix()}"


@step
def run(
    trained_model: Any, train_metrics: Any, loss_curve: Any, training_job: Any, **inputs: Any
) -> Trained:
    """Train; the inputs are those of the component, and of `train`."""
    finished = train(**inputs)
    write_job(training_job, finished.record)
    return write_outputs(finished, trained_model, train_metrics, loss_curve)


def train(
    run_id: str,
    task_name: str,
    task_id: str,
    dataset_path: str,
    training: Mapping[str, Any],
    backend: str,
    job: Mapping[str, Any],
    image: str,
    work_dir: str,
    task_config: Any,
    stop_epochs: int = 0,
) -> Finished:
    """Train, or continue, until `stop_epochs` or the end.

    `training` are fields of TrainConfig, `job` those of LaunchSpec and Supervision. InputError is
    raised before any rank starts; JobError has the rank that failed and its exception.
    """
    (training,) = split("training", training, TrainConfig)
    spec_fields, watched = split("job", job, LaunchSpec, Supervision, reserved=JOB_INTERNAL)
    supervision = Supervision.create(**watched)
    fields = {"image": image, **spec_fields}
    check_backend(backend, int(fields.get("nodes", 1)))
    task = task_title(task_name, task_id)
    work = folders.work_dir(work_dir)
    if is_remote(work) and backend != "local":
        check_bucket_training(spec_fields)
    place = create_run_folder(work, run_id, task)
    own: dict[str, Any] = {"data": dataset_path, "output_dir": place, "run_id": f"{run_id}/{task}"}
    if stop_epochs:  # of one folder, so that each part continues the last, in a job of its own
        own["stop_epochs"] = stop_epochs
        task_id = f"{task_id}.{stop_epochs}"
    if backend != "local" and supervision.heartbeat_minutes:
        own["stop_when_stale"] = f"{place}/{RunFolder.HEARTBEAT}"
        own["stale_seconds"] = supervision.heartbeat_minutes * 60
    config = TrainConfig.create(**with_timeout(training, spec_fields), **own)
    _record_mlflow_run(config, place)
    with using(run_id, place, dataset_path):
        if backend == "local":
            ranks = local_gpus(LaunchSpec.create(**fields, command=["true"]).nproc_per_node)
            with with_local_folders(config) as local:
                run_dir = Path(local.output_dir)
                record = _train_here(local, task_name, ranks)
                claim = ""
        else:
            ids = (run_id, task_name, task_id)
            config = config if is_remote(place) else with_local_weights(config)
            fields = with_task_config(task_config, {**fields, "kind": backend})
            with followed_folder(place) as (run_dir, refresh):
                record, claim = _train_on_cluster(config, fields, run_dir, ids, supervision)
                refresh()
    return Finished(run_dir, place, claim, record)


def _record_mlflow_run(config: TrainConfig, place: str) -> None:
    """Let the ranks log into the run that KFP's MLflow plugin made for this step.

    A folder has one run: a resume continues the first one.
    """
    given = run_of_step(config.mlflow_uri)
    if not given:
        return
    store = open_store(place)
    if not store.exists(MLFLOW):
        store.write(MLFLOW, json.dumps(given).encode())


def _train_here(config: TrainConfig, task_name: str, ranks: int) -> dict[str, Any]:
    """Train with processes of this step; returns its record."""
    folder = Path(config.output_dir)
    log.info(f"{task_name}: {ranks} rank(s), output in {folder}")
    ended = run_ranks(config.to_argv(), ranks, folder)
    if not (ended.code or ended.cancelled):
        return {"backend": "local", "config": config.model_dump(), "kfp_ddp": record_images()}
    newest = newest_checkpoint(folder)
    checkpoint = f"newest checkpoint: step {newest.step}" if newest else "no checkpoint yet"
    if ended.cancelled:
        raise RunCancelledError(
            f"training was stopped; {checkpoint} in {folder}; run it again to resume"
        )
    raise JobError(f"training failed: {ended.cause(folder)}; {checkpoint}")


def _train_on_cluster(
    config: TrainConfig,
    fields: dict[str, Any],
    run_dir: Path,
    ids: tuple[str, str, str],
    supervision: Supervision,
) -> tuple[dict[str, Any], str]:
    """Train with a job of `fields` for `ids`; returns the ended job, and the claim of `run_dir`."""
    api = Api.connect(otherwise=COMPUTE_HERE)
    fields = with_folders(api, fields, config.data, config.output_dir, "train")
    fields = on_workers(fields, node_command(config))
    spec = LaunchSpec.create(**fields, metrics_port=config.prometheus_port)
    if "shm_size" not in fields:
        processes = spec.processes()
        shared = size_of_pod(config, processes, spec.nodes * processes)
        spec = spec.model_copy(update={"shm_size": shared})
    stall = supervision.stall_minutes
    finished = launch(spec, *ids, api, run_dir, progress=True, stall_minutes=stall)
    ran = record_images(finished.pods, spec.job_kind.containers)
    return {**finished.job, "kfp_ddp": ran}, claim_of(fields, config.output_dir)


def node_command(config: TrainConfig) -> list[str]:
    """Return the command of each worker; Kubernetes must not expand any of its words."""
    words = map(unexpanded, config.to_argv())
    needs_download = is_remote(config.output_dir) or is_per_node(config.data)
    program = "kfp_ddp.runs.train.on_node" if needs_download else "kfp_ddp.training.node"
    return ["python3", "-m", program, "--", *words]


def with_timeout(training: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return `training` with the job's time-out of collectives; InputError if both have others."""
    minutes = job.get("nccl_timeout_minutes") or training.get("timeout_minutes")
    if minutes is None:
        return dict(training)
    own = training.get("timeout_minutes", minutes)
    if own != minutes:
        raise InputError(
            f"training sets timeout_minutes={own} and job nccl_timeout_minutes={minutes}, which "
            "are one time-out: give one of them"
        )
    return {**training, "timeout_minutes": minutes}


def write_outputs(finished: Finished, trained_model: Any, metrics: Any, loss_curve: Any) -> Trained:
    """Write the step's artifacts; the file of `trained_model` is a JSON pointer to the checkpoint.

    It also has the settings, and the file of `metrics` is a copy of `metrics.jsonl`, so that runs
    can be compared by their artifacts. JobError if the training left no checkpoint.
    """
    folder = RunFolder(finished.run_dir)
    newest, checkpoint = finished.chosen()
    figures = figures_of(finished.run_dir, newest)
    pointer = {
        "path": checkpoint,
        "digest": f"sha256:{newest.digest}",
        "step": newest.step,
        "model": newest.fields.get("model", ""),
        "claim": finished.claim,
        "metrics": figures,
    }
    for name, value in figures.items():
        metrics.log_metric(name, value)
    trained_model.metadata.update(pointer, kfp_ddp=finished.record["kfp_ddp"])
    settings = mapping_of(folder.config)
    write_artifact(trained_model, json.dumps({**pointer, "settings": settings}, indent=2) + "\n")
    write_artifact(metrics, folder.metrics.read_text(encoding="utf-8"))
    write_artifact(loss_curve, training_page(finished.run_dir))
    log.info(f"checkpoint {checkpoint}, step {newest.step}, sha256 {newest.digest}")
    return Trained(checkpoint, finished.place)


def figures_of(run_dir: Path, newest: Manifest) -> dict[str, float]:
    """Return the finite metrics: last loss, speed, accuracy and step of the checkpoint."""
    last: dict[str, dict[str, Any]] = {"step": {}, "eval": {}}
    own = dict[str, Any]()
    for event in read_events(RunFolder(run_dir).metrics):
        last[str(event.get("event"))] = event
        if (event.get("event"), event.get("step")) == ("eval", newest.step):
            own = event  # a resume may repeat it
    evaluation = own or last["eval"]
    unknown = math.nan
    figures: TrainFigures = {
        "step": newest.step,
        "train_loss": last["step"].get("loss", unknown),
        "images_per_s": last["step"].get("images_per_s", unknown),
        "val_loss": evaluation.get("loss", unknown),
        "val_accuracy": evaluation.get("accuracy", unknown),
        "val_top5": evaluation.get("top5", unknown),
    }
    return {name: float(value) for name, value in figures.items() if is_number(value)}
