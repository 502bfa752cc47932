"""`kfp-ddp doctor`: check that a cluster and namespace have what a run needs."""

import sys
from typing import Any, get_args

import click

from kfp_ddp.cli.options import AS_JSON, configured, echo, echo_json, text_option
from kfp_ddp.datasets.volume.request import Strategy
from kfp_ddp.jobs.launch_spec import Backend, LaunchSpec

MARKS = {"ok": ("✓", "green"), "bad": ("✗", "red"), "warn": ("!", "yellow")}


@click.command("doctor")
@configured("namespace", "context", "host")
@text_option(
    "--service-account",
    help="Check the permissions of this account of the namespace instead of yours.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    default="pytorchjob",
    help="Backend of the training.",
)
@click.option("--nodes", type=click.IntRange(1), default=1, help="Number of worker pods.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(-1),
    default=-1,
    help="GPUs per node; -1 for all, 0 to train on CPUs.",
)
@click.option("--gpu-resource", default="nvidia.com/gpu", help="Resource name of the GPUs.")
@click.option(
    "--scheduler",
    type=click.Choice(LaunchSpec.choices("scheduler")),
    default="",
    show_default=False,
    help="Gang scheduler of the job.",
)
@click.option("--data-claim", default="kfp-ddp-data", help="PVC of the datasets.")
@click.option("--work-claim", default="kfp-ddp-work", help="PVC of the checkpoints.")
@click.option(
    "--publish",
    type=click.Choice(get_args(Strategy)),
    default="in-place",
    help="How the dataset is published to workers.",
)
@click.option(
    "--bucket-secret", default="kfp-ddp-bucket", help="Secret with the bucket's credentials."
)
@text_option("--service", help="InferenceService to roll models out to.")
@click.option(
    "--claims-file",
    hidden=True,
    expose_value=False,
    help="No effect: kfp-ddp install creates missing PVCs.",
)
@AS_JSON
def command(as_json: bool, **requirements: Any) -> None:
    """Check the requirements of a run with these settings, with a remedy for each problem.

    Operators, permissions, PVCs, storage, credentials, quotas, PodSecurity, GPUs, queues and KFP.
    Exit code 1 for a problem that would stop the run. A line with ! is a warning, or could not be
    checked.
    """
    from kfp_ddp.checks.doctor import examine
    from kfp_ddp.checks.finding import Requirements

    findings = examine(Requirements(**requirements))
    worst = any(finding.state == "bad" for finding in findings)
    if as_json:
        objects = [finding.to_json() for finding in findings]
        echo_json({"ok": not worst, "findings": objects})
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            mark, color = MARKS[finding.state]
            click.secho(mark, fg=color, nl=False)
            echo(f" {finding.what:{width}}  {finding.message}")
            if finding.remedy:
                echo(f"  {'':{width}}  → {finding.remedy}")
    sys.exit(1 if worst else 0)
