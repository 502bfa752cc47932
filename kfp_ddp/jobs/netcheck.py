"""The netcheck step: pods like those of a training measure what lies between them."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kfp_ddp.core.errors import JobError
from kfp_ddp.core.settings import check_given, split
from kfp_ddp.core.step import step
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.local import local_gpus, run_ranks
from kfp_ddp.jobs.run import launch
from kfp_ddp.jobs.supervision import JOB_OWN, check_backend
from kfp_ddp.k8s.api import Api
from kfp_ddp.training.netcheck.record import RESULT, Network, NetworkCheck, need, problems, table

if TYPE_CHECKING:
    from kfp import dsl

PROGRAM = "kfp_ddp.training.netcheck"
_OF_A_TRAINING = ("elastic", "restart_policy", "retries")


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
    network_summary: "dsl.Markdown",
    network_metrics: "dsl.Metrics",
) -> bool:
    """Measure, and fill the artifacts; whether nothing is wrong."""
    (given,) = split("check", check, NetworkCheck, own={})
    asked = NetworkCheck.create(**given)
    check_backend(backend, nodes)
    if backend == "local":
        found = here(asked, int(job.get("nproc_per_node") or local_gpus()))
    else:
        own = {**JOB_OWN, **dict.fromkeys(("nodes", "gpus_per_node"), "is an input of its own")}
        check_given("job", job, own)
        size = {"kind": backend, "nodes": nodes, "gpus_per_node": gpus_per_node}
        fields = {"image": image, **job, **size}
        found = on_cluster(asked, fields, (run_id, task_name, task_id), Api.connect())
    wrong = problems(found, asked)
    Path(network_summary.path).write_text("\n".join(table(found, asked)) + "\n", encoding="utf-8")
    for name, value in figures(found, wrong).items():
        network_metrics.log_metric(name, value)
    for line in wrong or ["nothing wrong was found"]:
        print(line, flush=True)
    if said := need(found, asked):
        print(said, flush=True)
    return not wrong


def figures(found: Network, wrong: list[str]) -> dict[str, float]:
    """The figures that runs are compared by."""
    rates = [link.gbit_s for link in found.links]
    return {
        "problems": len(wrong),
        "latency_us": round(found.latency_us, 1),
        **({"bus_gbit_s": round(max(s.bus_gbit_s for s in found.sizes), 3)} if found.sizes else {}),
        **({"slowest_link_gbit_s": min(rates)} if rates else {}),
    }


def on_cluster(
    asked: NetworkCheck, fields: Mapping[str, Any], ids: tuple[str, str, str], api: Api
) -> Network:
    """Measure between the pods of a job.

    Args:
        asked: What is measured.
        fields: Those of LaunchSpec that make its pods.
        ids: Of run, task and iteration.
        api: The cluster, in the namespace of the job.

    Raises:
        KfpDdpError: the job cannot be made, or it failed.
    """
    words = ["python3", "-m", PROGRAM, "--", json.dumps(asked.given())]
    with contextlib.redirect_stdout(_WithoutResult(sys.stdout)):
        finished = launch(LaunchSpec.create(**{**fields, "command": words}), *ids, api)
    return _read(line for lines in finished.last_lines.values() for line in lines)


def require(gbit_s: float, fields: Mapping[str, Any], ids: tuple[str, str, str], api: Api) -> None:
    """Stop where the network between pods like a job's is not as it should be.

    Args:
        gbit_s: What each node must send to each other one.
        fields: Those of LaunchSpec that make the job.
        ids: Of run, task and iteration of the job.
        api: The cluster, in the namespace of the job.

    Raises:
        JobError: what is wrong, the worst first.
        KfpDdpError: it cannot be measured.
    """
    asked, (run_id, task_name, task_id) = NetworkCheck(min_gbit_s=gbit_s), ids
    pods = {name: value for name, value in fields.items() if name not in _OF_A_TRAINING}
    print("measuring the network before the training", flush=True)
    found = on_cluster(asked, pods, (run_id, f"{task_name}-network", task_id), api)
    if wrong := problems(found, asked):
        more = f"; and {len(wrong) - 1} more, see the log" if wrong[1:] else ""
        print("\n".join(table(found, asked)), flush=True)
        raise JobError(f"the network is not as it should be before a training: {wrong[0]}{more}")
    print(need(found, asked), flush=True)


def here(asked: NetworkCheck, ranks: int) -> Network:
    """Measure between processes of this machine.

    Args:
        asked: What is measured.
        ranks: How many.

    Raises:
        JobError: they failed.
    """
    with tempfile.TemporaryDirectory(prefix="netcheck-") as folder:
        with contextlib.redirect_stdout(_WithoutResult(sys.stdout)):
            ended = run_ranks([json.dumps(asked.given())], ranks, Path(folder), PROGRAM)
        if ended.code:
            raise JobError(f"the check of the network failed: {ended.cause(Path(folder))}")
    return _read([ended.last_line])


class _WithoutResult(io.StringIO):
    """The log of the ranks but for the line of the result, which is for programs."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log = log

    def write(self, text: str) -> int:
        """Pass a line on."""
        return len(text) if RESULT in text else self._log.write(text)

    def flush(self) -> None:
        """Pass on what waits."""
        self._log.flush()


def _read(lines: Iterable[str]) -> Network:
    """What rank 0 said.

    Raises:
        JobError: it did not.
    """
    for line in lines:
        _, found, text = line.partition(RESULT)
        if found:
            return Network.model_validate_json(text)
    raise JobError(
        "the check of the network ended without a result: look at the log above, and run it again"
    )
