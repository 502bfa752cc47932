"""The KFP component `data_sync`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def data_sync(
    version: dsl.Output[dsl.Dataset],
    report: dsl.Output[dsl.Markdown],
    source: str,
    data_dir: str,
    dataset: str = "",
    include: str = "",
    exclude: str = "",
    hostile_names: str = "error",
    symlinks: str = "error",
    verify: str = "list",
    pack: str = "none",
    delete: bool = True,
    max_delete: float = 0.5,
    dry_run: bool = False,
    concurrency: int = 64,
    bandwidth_mb: float = 0.0,
    keep_versions: int = 3,
    keep_hours: float = 168.0,
    lock_wait: int = 86400,
    options: dict = {},  # noqa: B006
) -> NamedTuple("Synced", [("digest", str), ("path", str)]):
    """Bring a bucket prefix to a claim as a verified version, named by its content.

    Unchanged data costs one listing and copies nothing. The version appears under
    `<data_dir>/versions/<first 12 digits of the digest>` when it is whole, or not at all.

    Args:
        version: Facts of the version: digest, path, files, bytes.
        report: What was added, changed, removed, linked and downloaded, and how fast.
        source: gs://bucket/prefix, s3://bucket/prefix, file:///folder, the path of a
            folder, or the https:// address of a _MANIFEST.jsonl with its files beside it.
        data_dir: Folder of the claim that holds the versions, where it is mounted.
        dataset: Name of the dataset: at most 40 lower-case letters, digits and dashes. Empty for
            the last part of the source with a hash of it.
        include: Globs of the names to take, comma-separated; empty for all. * stops at a
            slash, ** does not; a pattern without a slash is matched with the last segment.
        exclude: Globs of the names to leave out, comma-separated.
        hostile_names: For names that cannot be files: error, skip or encode.
        symlinks: For symbolic links in a source folder: error, skip or follow.
        verify: How a version that is there already is checked: list trusts it, quick compares
            sizes and times, full reads every byte. What is damaged is brought anew.
        pack: none for one file an object; tar for archives of about 256 MB, members sorted by
            name, for readers that stream. The training step reads image folders, not archives.
        delete: Whether files that the source no longer has are missing in the new version too.
        max_delete: Refuse if more than this share (0 to 1) of the files of the version before,
            of the same source, would be missing.
        dry_run: Only report what would be done; digest and path are those it would get.
        concurrency: Connections at once.
        bandwidth_mb: The most megabytes a second; 0 for no limit.
        keep_versions: Versions of this dataset to keep, the new one included; 0 for all.
        keep_hours: Versions that a sync gave to a run in the last so many hours are kept too, as
            the run may still read them: more than the longest run takes.
        lock_wait: Seconds to wait for another sync of the same folder, which may be the first of
            a large dataset. A version that is there already waits for nobody.
        options: Any of the inputs from include to lock_wait by name, for a pipeline that passes
            them on as one parameter: {"max_delete": 1}. They go before those inputs.
    """
    from kfp_ddp.components.data_sync.engine import run

    return run(
        version=version,
        report_artifact=report,
        source=source,
        data_dir=data_dir,
        dataset=dataset,
        inputs={
            "include": include,
            "exclude": exclude,
            "hostile_names": hostile_names,
            "symlinks": symlinks,
            "verify": verify,
            "pack": pack,
            "delete": delete,
            "max_delete": max_delete,
            "dry_run": dry_run,
            "concurrency": concurrency,
            "bandwidth_mb": bandwidth_mb,
            "keep_versions": keep_versions,
            "keep_hours": keep_hours,
            "lock_wait": lock_wait,
        },
        more=options,
    )
