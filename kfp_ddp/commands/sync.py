"""`kfp-ddp sync`: a bucket prefix to a folder, without Kubeflow."""

import sys
from pathlib import Path

import click

from kfp_ddp.components.data_sync.names import POLICIES
from kfp_ddp.components.data_sync.options import PACKS, SYMLINKS, VERIFY


@click.command("sync", context_settings={"show_default": True})
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--versions", is_flag=True, help="Keep versions by digest, and a link `current`.")
@click.option("--dataset", default="", help="Name of the versions; by default from SOURCE.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be done, write nothing.")
@click.option("--include", multiple=True, help="Glob of names to take; may be repeated.")
@click.option("--exclude", multiple=True, help="Glob of names to leave out; may be repeated.")
@click.option("--delete/--no-delete", default=None, help="Remove what the source does not have.")
@click.option("--max-delete", default=0.5, help="Largest share of files to remove.")
@click.option("--verify", type=click.Choice(VERIFY), help="How to check what is there already.")
@click.option(
    "--pack",
    type=click.Choice(PACKS),
    default="none",
    help="Pack files into tar archives (with --versions).",
)
@click.option(
    "--hostile-names",
    type=click.Choice(POLICIES),
    default="error",
    help="What to do with names that cannot be files.",
)
@click.option(
    "--symlinks",
    type=click.Choice(SYMLINKS),
    default="error",
    help="What to do with symbolic links in a source folder.",
)
@click.option("-j", "--concurrency", default=64, help="Connections at once.")
@click.option("--bandwidth-mb", default=0.0, metavar="MB/S", help="Limit; 0 for none.")
@click.option("--keep-versions", default=3, help="Versions to keep (with --versions); 0 for all.")
@click.option("--keep-hours", default=168.0, help="Also keep versions used in the last N hours.")
@click.option("--lock-wait", default=86400, metavar="S", help="Wait for another sync.")
@click.option("--timeout", default=30.0, metavar="S", help="Longest silence of a peer.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def command(
    source: str,
    target: Path,
    versions: bool,
    dataset: str,
    dry_run: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    delete: bool | None,
    max_delete: float,
    verify: str | None,
    pack: str,
    hostile_names: str,
    symlinks: str,
    concurrency: int,
    bandwidth_mb: float,
    keep_versions: int,
    keep_hours: float,
    lock_wait: int,
    timeout: float,
    quiet: bool,
) -> None:
    """Bring SOURCE (gs://bucket/prefix, s3://bucket/prefix or a folder) to the folder TARGET.

    Without --versions the files themselves lie in TARGET; what is there already is compared by
    size and time, and extras stay unless --delete is given.
    """
    from kfp_ddp.components.data_sync import report
    from kfp_ddp.components.data_sync.options import Options
    from kfp_ddp.components.data_sync.progress import Progress
    from kfp_ddp.components.data_sync.sync import sync

    options = Options(
        dataset=dataset,
        include=include,
        exclude=exclude,
        hostile_names=hostile_names,
        symlinks=symlinks,
        verify=verify or ("list" if versions else "quick"),
        pack=pack,
        delete=versions if delete is None else delete,
        max_delete=max_delete,
        concurrency=concurrency,
        bandwidth_mb=bandwidth_mb,
        keep_versions=keep_versions,
        keep_hours=keep_hours,
        lock_wait=lock_wait,
        timeout=timeout,
        mirror=not versions,
        dry_run=dry_run,
    )
    with Progress(sys.stderr, quiet=quiet) as progress:
        result = sync(source, target, options, progress.watch)
    if dry_run:
        click.echo("\n".join(report.table(result)))
    click.echo(report.line(result))
