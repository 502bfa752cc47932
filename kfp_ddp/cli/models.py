"""`kfp-ddp models`: what was exported, and which version is the champion."""

from typing import TYPE_CHECKING

import click

from kfp_ddp.cli.options import AS_JSON, configured, echo_json

if TYPE_CHECKING:
    from kfp_ddp.client.models import Version


@click.command("models")
@click.argument("name", default="")
@AS_JSON
@configured("destination")
def command(name: str, destination: str, as_json: bool) -> None:
    """List the models at the destination, or the versions of NAME: which data, run and settings.

    kfp-ddp models flowers --destination gs://bucket/models
    """
    from dataclasses import asdict

    from kfp_ddp.client import models
    from kfp_ddp.models import succession
    from kfp_ddp.models.champion import pointed_at
    from kfp_ddp.models.exported import exported

    where = models.opened(destination)
    if name:
        found = models.versions(where, name)
        moves = [one.model_dump() for one in succession.changes(where, name)]
        if as_json:
            shown = [asdict(one) for one in found]
            echo_json({"name": name, "versions": shown, "champions": moves})
            return
        _print_versions(found)
        for one in moves:
            by = f" by {one['by']}" if one["by"] else ""
            click.echo(
                f"{one['at'][:16]} {one['version']} replaced {one['replaced'] or 'none'}{by}"
            )
        return
    known = exported(where)
    champions = {each: pointed_at(where, each) for each in known}
    if as_json:
        told = {each: {"champion": champions[each], "versions": known[each]} for each in known}
        echo_json(told)
        return
    if not known:
        click.echo(f"no models at {where.uri}", err=True)
    for each, there in known.items():
        click.echo(f"{each}: champion {champions[each] or 'none'}, {len(there)} version(s)")


def _print_versions(found: "list[Version]") -> None:
    for one in found:
        mark = "champion" if one.champion else ""
        if one.damaged:
            click.echo(f"{one.version}  {mark:8}  ! {one.damaged}")
            continue
        facts = {
            "accuracy": f"{one.accuracy:.4f} of {one.samples:,}",
            "": one.architecture,
            "data": one.dataset_digest[:12],
            "run": one.run_id[:8],
            "compared with": one.compared_with,
            "exported": one.exported_at[:16].replace("T", " "),
        }
        words = (f"{label} {value}".strip() for label, value in facts.items() if value)
        click.echo(f"{one.version}  {mark:8}  {', '.join(words)}")
