"""`kfp-ddp manifest`: the job of a launch."""

import os

import click
import yaml

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import yaml_of
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec


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
    from kfp_ddp.jobs.engine import specification
    from kfp_ddp.jobs.identity import identify, metadata
    from kfp_ddp.jobs.jobs import script_map
    from kfp_ddp.jobs.shipping import payload
    from kfp_ddp.jobs.shipping.code import archive_of

    fields = dict(setting(text) for text in settings)
    check_reserved("settings", fields, {"kind": "is the first argument itself"})
    if os.path.isdir(folder := str(fields.get("code", ""))):  # false for a long text too
        fields["code"] = pack(archive_of(folder), ARCHIVE)
    spec = payload.bring(specification({}, None, **fields, kind=kind), None)
    identity = identify(run_id, task_name, "", spec)
    printed = []
    map_name = ""
    if payload.files(spec):
        code = script_map(spec, identity, None)
        code["metadata"]["namespace"] = namespace
        map_name = code["metadata"]["name"]
        printed.append(code)
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
        style = None
        if not plain:
            style = '"'
        elif "\n" in data:
            style = "|"
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
