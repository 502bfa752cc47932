"""`kfp-ddp doctor`: whether this cluster and namespace have what the components need."""

import json
import sys

import click

MARKS = {"ok": ("✓", "green"), "bad": ("✗", "red"), "warn": ("!", "yellow")}


@click.command("doctor")
@click.option("--namespace", "-n", default="", help="Namespace of the runs; the context's own.")
@click.option(
    "--service-account",
    default="",
    help="Ask for the rights of this account of the namespace instead of yours.",
)
@click.option("--host", default="", help="URL of the KFP API server, to compare its version.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(namespace: str, service_account: str, host: str, as_json: bool) -> None:
    """Check API server, operators, rights, claims, storage, GPUs, queues and KFP.

    Exit 1 if something is missing that no run can do without.
    """
    from kfp_ddp.doctor.checks import examine

    findings = examine(namespace, service_account, host)
    worst = any(finding.state == "bad" for finding in findings)
    if as_json:
        found = {"ok": not worst, "findings": [vars(finding) for finding in findings]}
        click.echo(json.dumps(found, indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            mark, color = MARKS[finding.state]
            click.echo(f"{click.style(mark, fg=color)} {finding.what:{width}}  {finding.said}")
            if finding.remedy:
                click.echo(f"  {'':{width}}  → {finding.remedy}")
    sys.exit(1 if worst else 0)
