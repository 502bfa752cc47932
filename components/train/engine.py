"""The `train` step: check everything, start the ranks, follow them, write what they made."""

from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.base import failure
from kfp_ddp.base.errors import InputError
from kfp_ddp.base.run_folder import open_run_dir
from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.launch import heartbeat
from kfp_ddp.components.shared.launch.local import processes
from kfp_ddp.components.shared.launch.local.ranks import GRACE_SECONDS, Ended, run_ranks
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec
from kfp_ddp.components.shared.launch.manifests.task_config import (
    claim_of,
    covering,
    overlaid,
    own_claims,
    read_only,
    with_claims,
)
from kfp_ddp.components.shared.launch.run import launch
from kfp_ddp.components.shared.step import step
from kfp_ddp.components.train import settings
from kfp_ddp.components.train.outputs import newest_checkpoint, write_job, write_outputs
from kfp_ddp.training.config import TrainConfig


class Trained(NamedTuple):
    """Outputs of the step: folder of the newest checkpoint, folder of the run."""

    checkpoint: str
    run_dir: str


class Artifacts(NamedTuple):
    """The step's output artifacts, as KFP hands them in."""

    trained_model: Any
    metrics: Any
    loss_curve: Any
    job: Any


@step
def run(
    run_id: str,
    task_name: str,
    task_id: str,
    work_dir: str,
    backend: str,
    nproc_per_node: int,
    heartbeat_minutes: float,
    training: dict[str, Any],
    more_training: dict[str, Any],
    cluster: dict[str, Any],
    more_cluster: dict[str, Any],
    task_config: Any,
    artifacts: Artifacts,
) -> Trained:
    """Train to the end or say in one line why not.

    Args:
        run_id: Id of the pipeline run.
        task_name: Name of the task in the pipeline.
        task_id: Tells iterations of a loop apart.
        work_dir: Folder that holds the folder of the run.
        backend: pytorchjob, trainjob or local.
        nproc_per_node: Ranks a node; 0 for one for each GPU, or one.
        heartbeat_minutes: Silence of this step after which a job stops itself; 0 for never.
        training: Fields of TrainConfig, the step's inputs.
        more_training: Further ones by name.
        cluster: Fields of LaunchSpec, the step's inputs.
        more_cluster: Further ones by name.
        task_config: What was set on the KFP task.
        artifacts: Where outputs go.

    Raises:
        InputError: for input that cannot be used, before any rank starts, and for a training
            that failed or was stopped, with the rank and its exception.
    """
    cluster = settings.of_job(cluster, more_cluster)
    settings.check_backend(backend, nproc_per_node, int(cluster["nodes"]))
    run_dir = open_run_dir(work_dir, run_id)
    own: dict[str, Any] = {"output_dir": str(run_dir), "run_id": f"{run_id}/{task_name}"}
    if backend != "local" and heartbeat_minutes:
        own["stop_when_stale"] = str(run_dir / heartbeat.FILE)
        own["stale_seconds"] = heartbeat_minutes * 60
    config = TrainConfig.create(**settings.of_training(training, more_training), **own)
    if backend == "local":
        job, claim = _train_here(config, task_name, nproc_per_node, run_dir), ""
    else:
        cluster = {**cluster, "kind": backend, "nproc_per_node": nproc_per_node}
        ids = (run_id, task_name, task_id)
        job, claim = _train_on_cluster(config, cluster, task_config, run_dir, ids)
    write_job(artifacts.job, job)
    newest = write_outputs(
        run_dir, claim, artifacts.trained_model, artifacts.metrics, artifacts.loss_curve
    )
    print(f"checkpoint {newest.path}, step {newest.step}, sha256 {newest.digest}", flush=True)
    return Trained(str(newest.path), str(run_dir))


def _train_here(
    config: TrainConfig, task_name: str, nproc_per_node: int, run_dir: Path
) -> dict[str, Any]:
    """Train with processes of this step; returns its record."""
    ranks = nproc_per_node or _local_gpus()
    left = processes.recorded(run_dir)
    if left is not None:
        print(f"ending process group {left}, left by an earlier attempt of this run", flush=True)
        processes.end(left, GRACE_SECONDS)
    print(f"{task_name}: {ranks} rank(s), output in {run_dir}", flush=True)
    ended = run_ranks(config.to_argv(), ranks, run_dir)
    if ended.code != 0 or ended.stopped_by is not None:
        raise InputError(_why(ended, run_dir))
    return {"backend": "local", "config": config.model_dump()}


def _train_on_cluster(
    config: TrainConfig,
    cluster: dict[str, Any],
    task_config: Any,
    run_dir: Path,
    ids: tuple[str, str, str],
) -> tuple[dict[str, Any], str]:
    """Train with a job; returns it as it ended, and the claim that `run_dir` lies on.

    Args:
        config: What the ranks get.
        cluster: Fields of LaunchSpec.
        task_config: What was set on the KFP task.
        run_dir: Folder of the run.
        ids: Run id, task name and task id.
    """
    api = Api.connect()
    fields = _with_folders(api, overlaid(task_config, cluster), config.data, str(run_dir))
    command = ["python3", "-m", "kfp_ddp.training.node", "--", *config.to_argv()]
    spec = LaunchSpec.create(**fields, command=command, metrics_port=config.prometheus_port)
    finished = launch(spec, *ids, api, run_dir, progress=True)
    return finished.job, claim_of(fields, str(run_dir))


def _with_folders(api: Api, fields: dict[str, Any], data: str, run_dir: str) -> dict[str, Any]:
    """`fields` with the claims of both folders, that of the data read-only where it can be."""
    fields = with_claims(fields, [data, run_dir], own_claims(api))
    every = [m["mountPath"] for m in fields.get("volume_mounts") or ()] + list(fields["claims"])
    for what, path in (("dataset_path", data), ("work_dir", run_dir)):
        if not covering(path, every):
            raise InputError(
                f"{what} {path} lies on no claim that the workers could mount; mount one on the "
                "train task with kubernetes.mount_pvc"
            )
    return read_only(fields, data, run_dir)


def _local_gpus() -> int:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "backend local needs an image with torch: use backend=pytorchjob on a cluster, or "
            "set_container_image of the trainer on this task"
        ) from error
    return max(1, torch.cuda.device_count())


def _why(ended: Ended, run_dir: Path) -> str:
    newest = newest_checkpoint(run_dir)
    kept = f"newest checkpoint: step {newest.step}" if newest else "no checkpoint yet"
    if ended.stopped_by is not None or ended.code == 143:
        return f"training was stopped; {kept} in {run_dir}; run it again to go on from there"
    return f"training failed: {_root_cause(run_dir, ended)}; {kept}"


def _root_cause(run_dir: Path, ended: Ended) -> str:
    """What the launcher found to have failed first; its last line where it could not say."""
    told = failure.read(run_dir / "logs")
    if told is None:
        return f"exit code {ended.code}: {ended.last_line or 'no output'}"
    return f"rank {told.rank}: {told.error}" if told.rank >= 0 else told.error
