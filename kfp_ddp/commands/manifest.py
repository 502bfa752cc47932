"""`kfp-ddp manifest`: the job that a launch would create, as YAML, without creating it."""

import click


@click.command("manifest")
@click.argument(
    "kind", type=click.Choice(["pytorchjob", "trainjob", "tfjob", "mpijob"]), metavar="KIND"
)
@click.argument("settings", nargs=-1, metavar="SETTING=VALUE...")
@click.option("--namespace", "-n", default="default", show_default=True, help="Its namespace.")
@click.option("--run-id", default="run", show_default=True, help="Id of the pipeline run.")
@click.option("--task-name", default="train", show_default=True, help="Name of the task.")
def command(
    kind: str, settings: tuple[str, ...], namespace: str, run_id: str, task_name: str
) -> None:
    """Print the KIND (pytorchjob, trainjob, tfjob or mpijob) of some settings; nothing is created.

    Settings are those of the components, with values in YAML:

    kfp-ddp manifest pytorchjob image=ghcr.io/you/trainer:1.0 nodes=2 gpus_per_node=8
    command='[python3, train.py]' claims='{/data: images:ro}'
    """
    import yaml

    from kfp_ddp.components.launch.identity import identify, metadata
    from kfp_ddp.components.launch.kinds import KINDS
    from kfp_ddp.components.launch.specification import LaunchSpec

    spec = LaunchSpec.create(kind=kind, **dict(_setting(text) for text in settings))
    identity = identify(run_id, task_name, "", spec)
    meta = metadata(spec, identity, namespace, 0, None)
    script_map = identity.name if spec.script else ""
    click.echo(yaml.safe_dump(KINDS[kind].manifest(spec, meta, script_map), sort_keys=False))


def _setting(text: str) -> tuple[str, object]:
    """A SETTING=VALUE argument; numbers stay text where the setting is one, as `cpu=4` is."""
    import yaml

    from kfp_ddp.components.launch.specification import LaunchSpec
    from kfp_ddp.training.errors import InputError

    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is no setting: write SETTING=VALUE, for example nodes=2")
    field = LaunchSpec.model_fields.get(name)
    if field is not None and field.annotation is str:
        return name, value
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"{name}={value!r} is no YAML value") from None
