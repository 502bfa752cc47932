"""`kfp-ddp gc`: what runs left and nobody uses."""

import click

from kfp_ddp.cli.options import AS_JSON, configured, show

KEEP = "Number of copies of each dataset, and of versions of each model, that remain."


@click.command("gc")
@configured("namespace", "context", "destination")
@click.option("--keep", type=click.IntRange(min=1), default=3, help=KEEP)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@AS_JSON
def gc(
    namespace: str, context: str, destination: str, keep: int, dry_run: bool, as_json: bool
) -> None:
    """Delete copies of datasets and published bundles that nobody uses, the oldest first.

    Copies that a pod mounts or an unfinished run has, champions, the versions that they replaced
    and those in service remain, and so does all that no record of a run names.
    """
    from kfp_ddp.client.cleanup import bundles, copies
    from kfp_ddp.client.models import open_models
    from kfp_ddp.k8s.api import Api

    api, where = Api.connect(namespace, context), open_models(destination) if destination else None
    for rehearsal in (True,) if dry_run else (True, False):
        lines = [f"claim {name}" for name in copies(api, keep, dry_run=rehearsal)]
        if where is not None:
            names = bundles(api, where, keep, dry_run=rehearsal)
            lines += [f"bundle {where.uri}/{name}" for name in names]
        word = "unused" if rehearsal else "deleted"
        if rehearsal == dry_run or not as_json:
            show(as_json, {word: lines}, *(f"{word}: {line}" for line in lines or ["nothing"]))
