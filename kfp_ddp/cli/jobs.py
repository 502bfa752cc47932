"""`kfp-ddp manifest` and `netcheck`: the job of a launch, and the network between its pods."""

import contextlib
import os
import sys
import uuid
from typing import Any, get_args

import click
import yaml

from kfp_ddp.cli.options import AS_JSON, configured, echo, model_options, show, text_option
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.images import PUBLIC, SETTINGS, Images
from kfp_ddp.core.text import yaml_of
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import Backend, LaunchSpec
from kfp_ddp.training.netcheck.record import NetworkCheck, problems, table


@click.command("manifest")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("settings", nargs=-1, metavar="SETTING=VALUE...")
@click.option("--namespace", "-n", default="default", help="Namespace of the job.")
@click.option("--run-id", default="run", help="Id of the run.")
@click.option("--task-name", default="train", help="Name of the task.")
def manifest(
    kind: str, settings: tuple[str, ...], namespace: str, run_id: str, task_name: str
) -> None:
    """Print the job for some settings without creating it.

    The settings are those of the component `job` (kfp-ddp settings), with values in YAML:

    kfp-ddp manifest pytorchjob image=ghcr.io/you/trainer:1.0 nodes=2 gpus_per_node=8
    command='[python3, train.py]' claims='{/data: images:ro}'

    With script="$(cat train.py)", or with code=FOLDER entry=train.py, the ConfigMap with the code
    is printed too.
    """
    from kfp_ddp.core.packed import ARCHIVE, pack
    from kfp_ddp.core.settings import check_reserved
    from kfp_ddp.jobs import payload
    from kfp_ddp.jobs.code import archive_of
    from kfp_ddp.jobs.engine import specification
    from kfp_ddp.jobs.identity import identify, metadata
    from kfp_ddp.jobs.jobs import script_map

    fields = dict(setting(text) for text in settings)
    check_reserved("settings", fields, {"kind": "is the first argument itself"})
    if os.path.isdir(folder := str(fields.get("code", ""))):  # false for a long text too
        fields["code"] = pack(archive_of(folder), ARCHIVE)
    spec = payload.bring(specification({}, None, **fields, kind=kind), None)
    identity = identify(run_id, task_name, "", spec)
    printed, map_name = [], ""
    if payload.files(spec):
        printed.append(script_map(spec, identity, None))
        map_name = printed[0]["metadata"]["name"]
        printed[0]["metadata"]["namespace"] = namespace
    meta = metadata(spec, identity, namespace, 0, None)
    printed.append(spec.job_kind.manifest(spec, meta, map_name))
    text = yaml.dump_all(printed, Dumper=_Readable, sort_keys=False, allow_unicode=True)
    click.echo(text, nl=False)


class _Readable(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Write an object at each of its places, since an alias is hard to read."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the node of a string, a block if YAML allows it."""
        plain = all(char == "\n" or char.isprintable() for char in data)
        style = ("|" if "\n" in data else None) if plain else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Readable.add_representer(str, _Readable.represent_str)


def setting(text: str) -> tuple[str, object]:
    """Parse SETTING=VALUE; values of text settings are not parsed as YAML, such as `cpu=4`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is not a setting; write SETTING=VALUE, for example nodes=2")
    field = LaunchSpec.model_fields.get(name)
    if field is not None and (field.annotation is str or LaunchSpec.choices(name)):
        return name, value
    try:
        return name, yaml_of(value)
    except InputError:
        raise InputError(f"{name}={value!r} is not a YAML value") from None


@click.command("netcheck")
@configured("namespace", "context", *SETTINGS)
@click.option("--nodes", type=click.IntRange(1), default=2, help="Pods, or local processes.")
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
@model_options(NetworkCheck, "gradient_mb", "step_ms", "min_gbit_s", "largest_mb", default=None)
@AS_JSON
def netcheck(
    namespace: str,
    context: str,
    nodes: int,
    gpus_per_node: int,
    kind: str,
    image: str,
    settings: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the network between the pods of a job, and name slow links.

    All-reduce by size, latency, each pair of nodes in both directions, interface, MTU, InfiniBand,
    DNS, and the estimated time of a training step. The job is like that of a training, and is
    deleted at the end, unless it failed. The exit code is 1 if there is a problem.
    """
    from kfp_ddp.client.submission import ensure_source
    from kfp_ddp.jobs.netcheck import here, job_settings, measure_on_cluster
    from kfp_ddp.k8s.api import Api
    from kfp_ddp.runs.teardown.engine import delete_jobs

    images = Images.create({name: options.pop(name) for name in SETTINGS})
    image = image or images.trainer
    check = NetworkCheck.create(**{n: value for n, value in options.items() if value is not None})
    if not as_json:
        where = "processes of this machine" if kind == "local" else f"pods of a {kind}"
        echo(f"measuring the network between {nodes} {where}", err=True)
    with contextlib.redirect_stdout(sys.stderr):
        own = {"nodes": nodes, "gpus_per_node": gpus_per_node, "image": image}
        fields = job_settings("--job", dict(map(setting, settings)), own, "is an option of its own")
        if kind == "local":
            network = here(check, LaunchSpec.create(**fields).nodes)
        else:
            api, run_id = Api.connect(namespace, context), f"netcheck-{uuid.uuid4().hex[:8]}"
            public = image == PUBLIC["trainer"] or (images.public and image == images.trainer)
            source = ensure_source(api) if public else ""
            try:
                network = measure_on_cluster(
                    check, {**fields, "kind": kind}, (run_id, "netcheck", ""), api, source
                )
            finally:
                delete_jobs(api, KINDS[kind], run_id)  # if it has not ended
    wrong = problems(network, check)
    show(as_json, {"problems": wrong, **network.model_dump()}, *table(network, check))
    if wrong:
        sys.exit(1)
