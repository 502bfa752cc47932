"""`kfp-ddp netcheck`: measure the network between the pods of a job, or local ranks."""

import contextlib
import sys
import uuid
from typing import TYPE_CHECKING, Any, get_args

import click

from kfp_ddp import __version__
from kfp_ddp.cli.options import AS_JSON, configured, echo, echo_json, text_option
from kfp_ddp.jobs.launch_spec import Backend
from kfp_ddp.training.netcheck.record import NetworkCheck

if TYPE_CHECKING:
    from kfp_ddp.training.netcheck.record import Network


def _help(name: str) -> str:
    return NetworkCheck.model_fields[name].description or ""


@click.command("netcheck")
@configured("namespace", "context", "registry", "trainer_image")
@click.option("--nodes", default=2, help="Number of pods, or of local processes.")
@click.option("--gpus-per-node", default=0, help="GPUs per pod; uses NCCL.")
@click.option(
    *("--backend", "--kind", "kind"),
    type=click.Choice(get_args(Backend)),
    default="pytorchjob",
    help="Kind of the job; local: processes of this machine.",
)
@text_option("--image", help="Image of the pods.  [default: the trainer's]")
@click.option(
    *("--job", "settings"),
    multiple=True,
    metavar="SETTING=VALUE",
    help="A setting of the job. May be repeated.",
)
@click.option("--gradient-mb", type=float, help=_help("gradient_mb"))
@click.option("--step-ms", type=float, help=_help("step_ms"))
@click.option("--min-gbit-s", type=float, help=_help("min_gbit_s"))
@click.option("--largest-mb", type=float, help=_help("largest_mb"))
@AS_JSON
def command(
    namespace: str,
    context: str,
    nodes: int,
    gpus_per_node: int,
    kind: str,
    registry: str,
    trainer_image: str,
    image: str,
    settings: tuple[str, ...],
    as_json: bool,
    **limits: float | None,
) -> None:
    """Measure the network between the pods of a job, and name slow links.

    All-reduce by size, latency, each pair of nodes in both directions, interface, MTU, InfiniBand,
    DNS, and the estimated time of a training step. The job is like that of a training, and is
    deleted at the end. The exit code is 1 if there is a problem.
    """
    from kfp_ddp.training.netcheck.record import problems, table

    check = NetworkCheck.create(**{n: value for n, value in limits.items() if value is not None})
    if not as_json:
        where = "processes of this machine" if kind == "local" else f"pods of a {kind}"
        echo(f"measuring the network between {nodes} {where}", err=True)
    image = image or trainer_image or f"{registry.rstrip('/')}/trainer:{__version__}"
    with contextlib.redirect_stdout(sys.stderr):
        size = {"nodes": nodes, "gpus_per_node": gpus_per_node, "image": image}
        network = _measure(check, kind, namespace, context, {**_job(settings), **size})
    wrong = problems(network, check)
    if as_json:
        echo_json({"problems": wrong, **network.model_dump()})
    else:
        for line in table(network, check):
            echo(line)
    if wrong:
        sys.exit(1)


def _measure(
    check: NetworkCheck, kind: str, namespace: str, context: str, fields: dict[str, Any]
) -> "Network":
    """Return the measurements; a job on the cluster is deleted."""
    from kfp_ddp.jobs.netcheck import here, on_cluster

    if kind == "local":
        return here(check, int(fields["nodes"]))
    from kfp_ddp.jobs.kinds import KINDS
    from kfp_ddp.k8s.api import Api
    from kfp_ddp.runs.teardown.engine import delete_jobs

    api, run_id = Api.connect(namespace, context), f"netcheck-{uuid.uuid4().hex[:8]}"
    try:
        return on_cluster(check, {**fields, "kind": kind}, (run_id, "netcheck", ""), api)
    finally:
        delete_jobs(api, KINDS[kind], run_id)


def _job(settings: tuple[str, ...]) -> dict[str, Any]:
    from kfp_ddp.cli.manifest import setting
    from kfp_ddp.core.settings import check_given
    from kfp_ddp.jobs.launch_spec import JOB_OWN

    fields = dict(map(setting, settings))
    own = ("nodes", "gpus_per_node", "image")
    check_given("--job", fields, {**JOB_OWN, **dict.fromkeys(own, "is an option of its own")})
    return fields
