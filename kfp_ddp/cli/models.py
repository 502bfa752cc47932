"""`kfp-ddp models`, `promote` and `rollback`: exported models and their champions."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, configured, echo, echo_json, text_option
from kfp_ddp.core.text import plural

if TYPE_CHECKING:
    from kfp_ddp.client.models import Version


@click.command("models")
@click.argument("name", default="")
@AS_JSON
@configured("destination")
def models(name: str, destination: str, as_json: bool) -> None:
    """List the models at the destination, or the versions of NAME with their data and runs.

    kfp-ddp models flowers --destination gs://bucket/models
    """
    from kfp_ddp.client import models
    from kfp_ddp.models.champion import history, list_versions, read_pointer

    where = models.open_models(destination)
    if name:
        versions = models.versions(where, name)
        changes = [change.model_dump() for change in history(where, name)]
        if as_json:
            rows = [asdict(version) for version in versions]
            echo_json({"name": name, "versions": rows, "champions": changes})
            return
        for version in versions:
            echo(_line(version))
        for one in changes:
            by = f" by {one['by']}" if one["by"] else ""
            echo(f"{one['at'][:16]} {one['version']} replaced {one['replaced'] or 'none'}{by}")
        return
    known = list_versions(where)
    champions = {model: read_pointer(where, model) for model in known}
    if as_json:
        echo_json(
            {model: {"champion": champions[model], "versions": known[model]} for model in known}
        )
        return
    if not known:
        echo(f"no models at {where.uri}", err=True)
    for model, names in known.items():
        echo(f"{model}: champion {champions[model] or 'none'}, {plural(len(names), 'version')}")


@click.command("promote")
@click.argument("name")
@click.argument("version")
@text_option("--instead-of", metavar="VERSION", help="Only if this version is the champion.")
@AS_JSON
@configured("destination", "model_registry")
def promote(
    name: str, version: str, instead_of: str, destination: str, model_registry: str, as_json: bool
) -> None:
    """Make VERSION the champion of the model NAME, with which the next model is compared.

    The version is verified first. If another one becomes the champion meanwhile, nothing changes.

    kfp-ddp promote flowers 67c0cb93 --destination gs://bucket/models
    """
    from kfp_ddp.client import models

    where, registry = models.open_models(destination), models.registry_at(model_registry)
    _print_change(name, models.promote(where, name, version, instead_of, registry), as_json)


@click.command("rollback")
@click.argument("name")
@AS_JSON
@configured("destination", "model_registry")
def rollback(name: str, destination: str, model_registry: str, as_json: bool) -> None:
    """Make the previous champion of the model NAME the champion again.

    The replaced version remains at the destination. A second rollback goes one further back.

    kfp-ddp rollback flowers --destination gs://bucket/models
    """
    from kfp_ddp.client import models

    where, registry = models.open_models(destination), models.registry_at(model_registry)
    _print_change(name, models.roll_back(where, name, registry), as_json)


def _print_change(name: str, change: tuple[str, str], as_json: bool) -> None:
    champion, replaced = change
    if as_json:
        echo_json({"name": name, "champion": champion, "replaced": replaced})
    elif champion == replaced:
        echo(f"{champion} is already the champion of {name}")
    else:
        echo(f"{champion} is the champion of {name}; replaced: {replaced or 'none'}")


def _line(version: "Version") -> str:
    mark = "champion" if version.champion else ""
    if version.damaged:
        return f"{version.version}  {mark:8}  ! {version.damaged}"
    facts = {
        "accuracy": f"{version.accuracy:.4f} of {version.samples:,}",
        "": version.architecture,
        "data": version.dataset_digest[:12],
        "run": version.run_id[:8],
        "compared with": version.compared_with,
        "exported": version.exported_at[:16].replace("T", " "),
    }
    texts = (f"{label} {value}".strip() for label, value in facts.items() if value)
    return f"{version.version}  {mark:8}  {', '.join(texts)}"
