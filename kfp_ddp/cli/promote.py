"""`kfp-ddp promote`: an exported version becomes the champion."""

import click

from kfp_ddp.cli.options import AS_JSON, configured, echo_json


@click.command("promote")
@click.argument("name")
@click.argument("version")
@click.option("--instead-of", default="", metavar="VERSION", help="Only if this is the champion.")
@AS_JSON
@configured("destination", "model_registry")
def command(
    name: str,
    version: str,
    instead_of: str,
    destination: str,
    model_registry: str,
    as_json: bool,
) -> None:
    """Make VERSION of the model NAME the champion, which the next one has to beat.

    It is verified first, and nothing happens if another one becomes the champion meanwhile.

    kfp-ddp promote flowers 67c0cb93 --destination gs://bucket/models
    """
    from kfp_ddp.client import models

    where, registry = models.opened(destination), models.registry_at(model_registry)
    tell(name, models.promote(where, name, version, instead_of, registry), as_json)


def tell(name: str, moved: tuple[str, str], as_json: bool) -> None:
    """Print who is the champion now, and who was."""
    now, before = moved
    if as_json:
        echo_json({"name": name, "champion": now, "replaced": before})
    elif now == before:
        click.echo(f"{now} is the champion of {name} already")
    else:
        click.echo(f"{now} is the champion of {name}, in place of {before or 'none'}")
