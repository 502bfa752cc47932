"""`kfp-ddp doctor`: whether this cluster and namespace have what a run needs."""

import sys
from pathlib import Path
from typing import Any, get_args

import click

from kfp_ddp.cli.options import AS_JSON, configured, echo_json
from kfp_ddp.jobs.supervision import Backend

MARKS = {"ok": ("✓", "green"), "bad": ("✗", "red"), "warn": ("!", "yellow")}


@click.command("doctor")
@configured("namespace", "context")
@click.option(
    "--service-account",
    default="",
    help="Ask for the rights of this account of the namespace instead of yours.",
)
@click.option("--host", default="", help="URL of the KFP API server, to see its version.")
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    default="pytorchjob",
    show_default=True,
    help="What trains.",
)
@click.option(
    "--nodes", type=click.IntRange(1), default=1, show_default=True, help="Worker pods of the run."
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(-1),
    default=-1,
    show_default=True,
    help="GPUs of each; -1 for as many as nodes have, 0 to train on CPUs.",
)
@click.option(
    "--gpu-resource", default="nvidia.com/gpu", show_default=True, help="What GPUs are called."
)
@click.option(
    "--scheduler",
    type=click.Choice(["", "kueue", "volcano", "coscheduling", "runai"]),
    default="",
    help="Who starts the pods of a job together.",
)
@click.option("--data-claim", default="kfp-ddp-data", show_default=True, help="Claim of datasets.")
@click.option(
    "--work-claim", default="kfp-ddp-work", show_default=True, help="Claim of checkpoints."
)
@click.option(
    "--publish",
    type=click.Choice(["auto", "in-place", "clone", "snapshot", "populator", "none"]),
    default="in-place",
    show_default=True,
    help="How workers get the data.",
)
@click.option(
    "--bucket-secret",
    default="kfp-ddp-bucket",
    show_default=True,
    help="Secret with a bucket's credentials.",
)
@click.option("--service", default="", help="InferenceService that a model is rolled out on.")
@click.option(
    "--claims-file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("deploy/storage/claims.yaml"),
    show_default=True,
    help="The claims to make where they are missing.",
)
@AS_JSON
def command(as_json: bool, **asked: Any) -> None:
    """Check what a run with these settings needs, each with what to do about it.

    Operators, rights, claims, storage, credentials, quotas, PodSecurity, GPUs, queues and KFP.
    Exit 1 for anything that would stop the run; a line with ! may, or could not be seen.
    """
    from kfp_ddp.checks.doctor.examine import examine
    from kfp_ddp.checks.doctor.finding import Asked

    findings = examine(Asked(**asked))
    worst = any(finding.state == "bad" for finding in findings)
    if as_json:
        found = {"ok": not worst, "findings": [vars(finding) for finding in findings]}
        echo_json(found)
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            mark, color = MARKS[finding.state]
            click.echo(f"{click.style(mark, fg=color)} {finding.what:{width}}  {finding.said}")
            if finding.remedy:
                click.echo(f"  {'':{width}}  → {finding.remedy}")
    sys.exit(1 if worst else 0)
