"""The KFP component `data_sync`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def data_sync(
    dataset_version: dsl.Output[dsl.Dataset],
    sync_report: dsl.Output[dsl.Markdown],
    source: str,
    data_dir: str = "",
    dataset: str = "",
    options: dict = {},  # noqa: B006
    run_id: str = "",
    layout: dict = {},  # noqa: B006
) -> NamedTuple("Synced", [("digest", str), ("path", str), ("dataset", str)]):
    """Bring a bucket prefix to a claim as a verified version, named by its content.

    Unchanged data costs one listing and copies nothing. The version appears under
    `<data_dir>/versions/<first 12 digits of the digest>` when it is whole, or not at all.

    Args:
        dataset_version: Facts of the version: dataset, digest, path, files, bytes.
        sync_report: What was added, changed, removed, linked and downloaded, and how fast.
        source: Where the files are: gs://bucket/prefix, s3://, az://, hf://, https:// or a folder.
        data_dir: Folder of the claim with the versions; empty for KFP_DDP_DATA_DIR or /data.
        dataset: Name of the dataset; empty for the last part of the source with a hash of it.
        options: Settings of the sync by name, such as {"max_delete": 1}; all are in the README.
        run_id: Id of the pipeline run, which holds the version; empty to go by keep_hours alone.
        layout: Settings of the training that say where classes and splits are; empty for no check.
    """
    inputs = dict(locals())
    from kfp_ddp.datasets.engine import run

    return run(**inputs)
