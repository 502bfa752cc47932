"""`kfp-ddp install`, `uninstall` and `doctor`: what a run needs in a cluster and a namespace."""

import sys
from pathlib import Path
from typing import Any

import click

from kfp_ddp.checks.access import enforced, secret
from kfp_ddp.checks.claims import unfinished_owner
from kfp_ddp.checks.finding import CheckContext, Finding, Requirements
from kfp_ddp.cli.options import (
    AS_JSON,
    configured,
    connected,
    echo,
    echo_json,
    field_options,
    model_options,
    show,
)
from kfp_ddp.core.config import Connection
from kfp_ddp.core.container_images import SETTINGS, Images
from kfp_ddp.install import apply as installer
from kfp_ddp.install import files, manifests
from kfp_ddp.install.apply import Done
from kfp_ddp.install.manifests import OWNERS, Installation
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.api import STEPS, Api
from kfp_ddp.plan.form import DatasetSettings, Parameters

WORDS = {"left": "exists, unchanged"}
CLAIMS = {"both": ("data", "work"), "data": ("data",), "none": ()}
STDOUT = "-"


@click.command("install")
@configured("namespace", "context", *SETTINGS, "pip_index_url", "pip_proxy")
@field_options(Installation, "storage_class", "access_mode", "size", "image", "see_nodes", "copies")
@field_options(Installation, "divide_accounts", "network_policy")
@click.option(
    *("--egress-port", "egress_ports"),
    type=click.IntRange(1, 65535),
    multiple=True,
    help="With --network-policy, a further TCP port that pods may connect to, such as 9000 of a "
    "bucket. May be repeated.",
)
@click.option(
    "--claims",
    "which",
    type=click.Choice(list(CLAIMS)),
    default="both",
    help="both for train_resnet, data for train_resnet_bucket, none for train_resnet_claimless.",
)
@field_options(Requirements, "data_claim")
@model_options(Parameters, "work_claim", "bucket_secret")
@click.option(
    "--chown",
    type=click.Choice(["auto", "root", "group", "no"]),
    default="auto",
    help="Job that makes uid 1000 the owner of new volumes: auto for PVCs that are created now, or "
    "if an earlier job did not complete, as root, or by group if PodSecurity is restricted. "
    "--print includes it with root or group.",
)
@click.option(
    "--dry-run", is_flag=True, help="Server-side dry run: print the changes without making them."
)
@click.option(
    "--print",
    "printed",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[DIR]",
    type=click.Path(path_type=Path, file_okay=False),
    help="Print the manifests without contacting the cluster, or write them to DIR, to keep in "
    "git: a kustomization with a file for each kind, and our source in source.yaml. The source is "
    "too large for a plain kubectl apply: use kubectl apply --server-side.",
)
@click.option(
    "--list-images",
    is_flag=True,
    help="Print the images of runs, to mirror or to permit them, and do nothing else.",
)
@AS_JSON
def install(
    which: str,
    chown: str,
    dry_run: bool,
    printed: Path | None,
    list_images: bool,
    as_json: bool,
    bucket_secret: str,
    context: str,
    **fields: Any,
) -> None:
    """Create what runs need in a namespace: PVCs, permissions, our source, a disruption budget.

    The source of this version is put into a ConfigMap, from which pods of public images take it;
    with a registry of your own images it is not. It can be repeated: existing objects are updated,
    except PVCs, which do not change. All objects are validated by the server first; if it refuses
    one, nothing is created. A namespace with a quota and no LimitRange also gets one.
    """
    images = Images.create({name: fields.pop(name) for name in SETTINGS})
    if list_images:
        listed = images.listed()
        show(as_json, listed, *map("{:9} {}".format, listed, listed.values()))
        return
    fields["image"] = fields["image"] or images.launcher
    fields["source"] = images.public
    _leave_out_claims(fields, which)
    if printed:
        namespace = fields["namespace"] or "kubeflow"
        target = Installation(**{**fields, "namespace": namespace})
        _print(target, chown, printed)
        return
    api = Api.connect(fields["namespace"], context)
    target = Installation(**{**fields, "namespace": api.namespace})
    done = _install(api, target, chown, dry_run=dry_run, quiet=as_json)
    (credentials,) = secret(CheckContext(api, Requirements(bucket_secret=bucket_secret), None))
    refused = [result for result in done if result.state == "refused"]
    # Without its part for the cluster an installation works, with fewer rights.
    stopped = any(not result.kind.startswith("Cluster") for result in refused)
    if as_json:
        document = {"namespace": api.namespace, "dry_run": dry_run, "ok": not stopped}
        objects = [result._asdict() for result in done]
        echo_json({**document, "objects": objects, "secret": credentials._asdict()})
    else:
        if any(result.name.startswith("kfp-ddp-nodes") for result in refused):
            echo("  → without permission to read nodes, runs need gpus_per_node")
        _print_next(target, credentials, dry_run)
    sys.exit(int(stopped))


def _leave_out_claims(fields: dict[str, Any], which: str) -> None:
    """Empty the names of the PVCs that are not of the choice."""
    for name in {"data", "work"} - {*CLAIMS[which]}:
        fields[f"{name}_claim"] = ""


def _print(target: Installation, chown: str, folder: Path) -> None:
    """Print or write the manifests, as they are known without a cluster."""
    import yaml

    manifests.check_options(target)
    objects = manifests.manifests(target)
    jobs = []
    if chown in OWNERS and target.claims:
        jobs.append(manifests.owner(target, chown))
    if str(folder) == STDOUT:
        click.echo(yaml.safe_dump_all([*objects, *jobs], sort_keys=False), nl=False)
        return
    written = files.write(objects, jobs, folder)
    for name, size in written.sizes.items():
        echo(f"wrote {folder / name}, {size / 1000:,.1f} kB")
    echo(f"Next: kubectl apply --server-side -k {folder}")
    for name in written.once:
        echo(f"and once: kubectl apply -f {folder / name}")


def _print_next(target: Installation, credentials: Finding, dry_run: bool) -> None:
    """Print the state of the bucket's secret, and the next command."""
    mark, _ = MARKS[credentials.state]
    echo(f"{mark} {credentials.what} {credentials.message}")
    if credentials.remedy:
        echo(f"  → {credentials.remedy}")
    if target.divide_accounts:
        account = STEPS
        echo(f"Runs are divided with --service-account {STEPS} or KFP_DDP_SERVICE_ACCOUNT")
    else:
        account = "pipeline-runner" if target.namespace == "kubeflow" else "default-editor"
    if not dry_run:
        echo(f"Next: kfp-ddp doctor -n {target.namespace} --service-account {account}")


def _install(
    api: Api, target: Installation, chown: str, *, dry_run: bool, quiet: bool
) -> list[Done]:
    """Create the objects, print the results, and wait until new volumes are writable."""
    manifests.check(api, target)
    objects = manifests.manifests(target)
    if installer.lacks_limits(api):
        objects.append(manifests.limits(target))
    done = installer.apply(api, objects, dry_run=dry_run)
    how = _owner(api, target, chown, done)
    job = manifests.owner(target, how) if how else None
    if target.source and not dry_run:
        done += installer.replace(api, manifests.index(target))
    if job and not dry_run:
        done += installer.replace(api, job)
    if not quiet:
        for result in done:
            echo(_line(result, dry_run))
    if job and not dry_run:
        name = job["metadata"]["name"]
        for reason in installer.wait(api, job):
            echo(f"  {name} waits: {reason}", err=True)
    return done


def _owner(api: Api, target: Installation, chown: str, done: list[Done]) -> str:
    """Return which job of OWNERS makes the volumes writable; '' for none."""
    if not target.claims:
        return ""
    if chown in OWNERS:
        return chown
    if chown == "no":
        return ""
    # Auto: new volumes need it, and so do those of a job that did not complete.
    new = [result for result in done if result.state == "made"]
    has_new_volume = any(result.kind == "PersistentVolumeClaim" for result in new)
    if not has_new_volume and not unfinished_owner(api):
        return ""
    return "group" if enforced(api) == "restricted" else "root"


def _line(result: Done, dry_run: bool) -> str:
    mark = "!" if result.state == "refused" else "✓"
    word = WORDS.get(result.state, result.state)
    if dry_run and result.state in ("made", "changed", "deleted"):
        word = f"would be {word}"
    message = f": {result.message}" if result.message else ""
    return f"{mark} {result.kind} {result.name} {word}{message}"


@click.command("uninstall")
@configured("namespace", "context")
@click.option(
    "--claims",
    "which",
    type=click.Choice(list(CLAIMS)),
    default="none",
    help="PVCs to delete, with all datasets, checkpoints and bundles on them.",
)
@field_options(Requirements, "data_claim")
@model_options(Parameters, "work_claim")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@AS_JSON
def uninstall(context: str, which: str, dry_run: bool, as_json: bool, **fields: Any) -> None:
    """Delete what install made in a namespace, also the source of earlier versions.

    The PVCs remain, unless --claims names them. So do a bucket's secret, copies of datasets (see
    gc) and the rights on the cluster that another namespace uses. Runs fail without it, also those
    of schedules: cancel and pause them first.
    """
    api = Api.connect(fields["namespace"], context)
    _leave_out_claims(fields, which)
    everything = {"see_nodes": True, "copies": True, "divide_accounts": True, "source": False}
    fields |= {**everything, "network_policy": True, "namespace": api.namespace}
    done = installer.remove(api, Installation(**fields), dry_run=dry_run)
    refused = any(result.state == "refused" for result in done)
    document = {"namespace": api.namespace, "dry_run": dry_run, "ok": not refused}
    lines = [_line(result, dry_run) for result in done]
    objects = [result._asdict() for result in done]
    show(as_json, {**document, "objects": objects}, *(lines or ["nothing is installed"]))
    sys.exit(int(refused))


MARKS = {"ok": ("✓", "green"), "bad": ("✗", "red"), "warn": ("!", "yellow")}


@click.command("doctor")
@connected
@model_options(Parameters, "backend", "work_claim", "bucket_secret")
@model_options(LaunchSpec, "nodes", "gpu_resource", "scheduler")
@model_options(DatasetSettings, "publish")
@field_options(Requirements, "service_account", "gpus_per_node", "data_claim", "service")
@AS_JSON
def doctor(connection: Connection, as_json: bool, **fields: Any) -> None:
    """Check the requirements of a run with these settings, with a remedy for each problem.

    Operators, permissions, PVCs, storage, credentials, quotas, PodSecurity, GPUs, queues and KFP.
    Exit code 1 for a problem that would stop the run. A line with ! is a warning, or could not be
    checked.
    """
    from kfp_ddp.checks.doctor import examine
    from kfp_ddp.client.kfp.connection import open_client

    def version() -> str:
        with open_client(connection) as client:
            return client.version

    fields |= {name: getattr(connection, name) for name in ("namespace", "context", "host")}
    requirements = Requirements(**fields)
    findings = examine(requirements, version)
    worst = any(finding.state == "bad" for finding in findings)
    if as_json:
        objects = [finding._asdict() for finding in findings]
        echo_json({"ok": not worst, "findings": objects})
    else:
        _print_findings(findings)
    sys.exit(int(worst))


def _print_findings(findings: list[Finding]) -> None:
    """Print each finding in a line, with its remedy below it."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark, color = MARKS[finding.state]
        click.secho(mark, fg=color, nl=False)
        echo(f" {finding.what:{width}}  {finding.message}")
        if finding.remedy:
            echo(f"  {'':{width}}  → {finding.remedy}")
