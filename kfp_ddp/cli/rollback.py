"""`kfp-ddp rollback`: the champion before this one is the champion again."""

import click

from kfp_ddp.cli.options import AS_JSON, configured


@click.command("rollback")
@click.argument("name")
@AS_JSON
@configured("destination", "model_registry")
def command(name: str, destination: str, model_registry: str, as_json: bool) -> None:
    """Make the champion of the model NAME before this one the champion again.

    The version that is left stays at the destination. Again goes one further back.

    kfp-ddp rollback flowers --destination gs://bucket/models
    """
    from kfp_ddp.cli.promote import tell
    from kfp_ddp.client import models

    where, registry = models.opened(destination), models.registry_at(model_registry)
    tell(name, models.roll_back(where, name, registry), as_json)
