"""The netcheck step: measure the network between pods like those of a training."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.settings import check_reserved, split
from kfp_ddp.core.step import Artifact, step, write_artifact
from kfp_ddp.jobs.launch_spec import JOB_INTERNAL, LaunchSpec, check_backend
from kfp_ddp.jobs.local import local_gpus, run_ranks
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.source import on_workers
from kfp_ddp.k8s.api import Api
from kfp_ddp.training.netcheck.record import RESULT, Network, NetworkCheck, need, problems, table

PROGRAM = "kfp_ddp.training.netcheck"
_ONLY_TRAINING = ("elastic", "restart_policy", "retries")


@step
def run(
    *,
    run_id: str,
    task_name: str,
    task_id: str,
    backend: str,
    nodes: int,
    gpus_per_node: int,
    job: Mapping[str, Any],
    check: Mapping[str, Any],
    image: str,
    network_summary: Artifact,
    network_metrics: Any,
) -> bool:
    """Measure and fill the artifacts; return whether there are no problems."""
    (fields,) = split("check", check, NetworkCheck)
    settings = NetworkCheck.create(**fields)
    check_backend(backend, nodes=1)  # the processes of this machine are of any number of nodes
    own = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    pods = {"image": image, **job_settings("job", job, own, "is an input of its own")}
    if backend == "local":
        network = here(settings, local_gpus(LaunchSpec.create(**pods).nproc_per_node))
    else:
        ids = run_id, task_name, task_id
        network = measure_on_cluster(settings, {**pods, "kind": backend}, ids, Api.connect())
    wrong = problems(network, settings)
    summary = "\n".join(table(network, settings))
    write_artifact(network_summary, f"{summary}\n")
    for name, value in figures(network, wrong).items():
        network_metrics.log_metric(name, value)
    for line in wrong or ["no problems found"]:
        print(line, flush=True)
    if needed := need(network, settings):
        print(needed, flush=True)
    return not wrong


def figures(network: Network, wrong: list[str]) -> dict[str, float]:
    """Return the figures by which runs are compared."""
    values: dict[str, float] = {"problems": len(wrong), "latency_us": round(network.latency_us, 1)}
    if network.sizes:
        values["bus_gbit_s"] = round(max(size.bus_gbit_s for size in network.sizes), 3)
    if network.links:
        values["slowest_link_gbit_s"] = min(link.gbit_s for link in network.links)
    return values


def job_settings(
    subject: str, job: Mapping[str, Any], own: Mapping[str, Any], why: str
) -> dict[str, Any]:
    """Return settings of a job with the step's `own`; InputError if `job` sets one of these."""
    check_reserved(subject, job, {**JOB_INTERNAL, **dict.fromkeys(own, why)})
    return {**job, **own}


def measure_on_cluster(
    settings: NetworkCheck,
    fields: Mapping[str, Any],
    ids: tuple[str, str, str],
    api: Api,
    source: str = "",
) -> Network:
    """Measure between the pods of a job, and delete it: a retry measures again.

    `fields` are fields of LaunchSpec for its pods, `ids` the ids of run, task and iteration.
    `source` is as in `on_workers`. Raises KfpDdpError.
    """
    command = ["python3", "-m", PROGRAM, "--", json.dumps(settings.explicit())]
    spec = LaunchSpec.create(**on_workers(fields, command, source))
    with contextlib.redirect_stdout(_WithoutResult()):
        finished = launch(spec, *ids, api)
    api.delete(spec.job_kind.resource, finished.job["metadata"]["name"])
    return _read(line for lines in finished.last_lines.values() for line in lines)


def require(gbit_s: float, fields: Mapping[str, Any], ids: tuple[str, str, str], api: Api) -> None:
    """Raise JobError if the network between pods like a job's is too slow or faulty.

    `fields` are fields of LaunchSpec of the job, `ids` the ids of run, task and iteration.
    """
    settings, (run_id, task_name, task_id) = NetworkCheck(min_gbit_s=gbit_s), ids
    size = {"nodes": LaunchSpec.create(**fields).pods()}  # of an elastic job, those at its start
    pods = {name: value for name, value in fields.items() if name not in _ONLY_TRAINING} | size
    print("measuring the network before the training", flush=True)
    network = measure_on_cluster(settings, pods, (run_id, f"{task_name}-network", task_id), api)
    if wrong := problems(network, settings):
        more = f"; and {len(wrong) - 1} more, see the log" if wrong[1:] else ""
        print("\n".join(table(network, settings)), flush=True)
        raise JobError(f"the network is not fit for a training: {wrong[0]}{more}")
    print(need(network, settings), flush=True)


def here(settings: NetworkCheck, ranks: int) -> Network:
    """Measure between processes of this machine; JobError if they fail."""
    with tempfile.TemporaryDirectory(prefix="netcheck-") as folder:
        with contextlib.redirect_stdout(_WithoutResult()):
            ended = run_ranks([json.dumps(settings.explicit())], ranks, Path(folder), PROGRAM)
        if ended.code:
            raise JobError(f"the check of the network failed: {ended.cause(Path(folder))}")
    return _read([ended.last_line])


class _WithoutResult(io.StringIO):
    """The log of the ranks without the lines of the result, which are for programs."""

    def __init__(self) -> None:
        super().__init__()
        self._log = sys.stdout

    def write(self, text: str) -> int:
        """Write a line to the log."""
        return len(text) if RESULT in text else self._log.write(text)

    def flush(self) -> None:
        """Flush the log."""
        self._log.flush()


def _read(lines: Iterable[str]) -> Network:
    """Return the result of rank 0; JobError if there is none."""
    text = "".join(line.partition(RESULT)[2] for line in lines)
    try:
        return Network.model_validate_json(text)
    except ValueError:
        raise JobError(
            "the check of the network ended without a result: see the log, run it again"
        ) from None
