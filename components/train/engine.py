"""The `train` step: check everything, start the ranks, follow them, write what they made."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from kfp_ddp.components.launch import processes
from kfp_ddp.components.launch.local import GRACE_SECONDS, Ended, run_ranks
from kfp_ddp.components.launch.outputs import newest_checkpoint, write_outputs
from kfp_ddp.components.step import step
from kfp_ddp.training.config import TrainConfig
from kfp_ddp.training.errors import InputError

BACKENDS = ("local",)
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Trained(NamedTuple):
    """Outputs of the step: folder of the newest checkpoint, folder of the run."""

    checkpoint: str
    run_dir: str


@step
def run(
    run_id: str,
    task_name: str,
    work_dir: str,
    backend: str,
    nproc_per_node: int,
    training: dict[str, Any],
    trained_model: Any,
    metrics: Any,
    loss_curve: Any,
) -> Trained:
    """Train to the end or say in one line why not; `training` holds the fields of `TrainConfig`.

    Raises:
        InputError: for input that cannot be used, before any rank starts, and for a training
            that failed or was stopped, with the rank and its exception.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend {backend!r} is not known; use one of {', '.join(BACKENDS)}")
    run_dir = open_run_dir(work_dir, run_id)
    config = TrainConfig.create(**training, output_dir=str(run_dir))
    ranks = _ranks(nproc_per_node)
    left = processes.recorded(run_dir)
    if left is not None:
        print(f"ending process group {left}, left by an earlier attempt of this run", flush=True)
        processes.end(left, GRACE_SECONDS)
    print(f"{task_name}: {ranks} rank(s), output in {run_dir}", flush=True)
    ended = run_ranks(config.to_argv(), ranks, run_dir)
    if ended.code != 0 or ended.stopped_by is not None:
        raise InputError(_why(ended, run_dir))
    newest = write_outputs(run_dir, "", trained_model, metrics, loss_curve)
    print(f"checkpoint {newest.path}, step {newest.step}, sha256 {newest.digest}", flush=True)
    return Trained(str(newest.path), str(run_dir))


def open_run_dir(work_dir: str, run_id: str) -> Path:
    """The folder of a run, made if need be.

    Raises:
        InputError: for a run id that is no plain name, or a folder that cannot be written.
    """
    if not RUN_ID.fullmatch(run_id):
        raise InputError(
            f"run_id {run_id!r} cannot name a folder: it must be 1 to 128 letters, digits, "
            "'.', '_' or '-' and start with a letter or digit; pass the id of the pipeline run"
        )
    run_dir = Path(work_dir) / run_id
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"work_dir {work_dir} cannot be written ({error.strerror}); mount the work claim "
            "there, writable for this user, or give another folder"
        ) from error
    return run_dir.resolve()


def _ranks(nproc_per_node: int) -> int:
    if nproc_per_node < 0:
        raise InputError(f"nproc_per_node={nproc_per_node}: use 0 (one for each GPU) or more")
    if nproc_per_node > 0:
        return nproc_per_node
    import torch

    return max(1, torch.cuda.device_count())


def _why(ended: Ended, run_dir: Path) -> str:
    newest = newest_checkpoint(run_dir)
    kept = f"newest checkpoint: step {newest.step}" if newest else "no checkpoint yet"
    if ended.stopped_by is not None or ended.code == 143:
        return f"training was stopped; {kept} in {run_dir}; run it again to go on from there"
    return f"training failed: {_root_cause(run_dir, ended)}; {kept}"


def _root_cause(run_dir: Path, ended: Ended) -> str:
    """What the launcher found to have failed first; its last line where it could not say."""
    try:
        failure = json.loads((run_dir / "logs" / "failure.json").read_text())
        rank, error = int(failure["rank"]), str(failure["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"exit code {ended.code}: {ended.last_line or 'no output'}"
    return f"rank {rank}: {error}" if rank >= 0 else error
