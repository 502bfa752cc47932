"""The KFP component `dataset_volume`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def dataset_volume(
    volume_report: dsl.Output[dsl.Markdown],
    dataset: str,
    digest: str,
    path: str,
    claim: str,
    publish: str = "in-place",
    source: str = "",
    run_id: str = "",
    options: dict = {},  # noqa: B006
    sync: dict = {},  # noqa: B006
) -> NamedTuple("Volume", [("claim", str), ("path", str)]):
    """Make a synced version of a dataset ready to be mounted by any number of workers.

    Do not mount the claim in this step: a copy is made only when no writer has it mounted.
    A published claim is named ds-<dataset>-<first 12 digits of the digest> and used again.

    Args:
        volume_report: Which claim to mount, how it was made, and why so.
        dataset: Name of the dataset, from data_sync.
        digest: Digest of the version, from data_sync.
        path: Folder of the version, from data_sync; it is the same in every copy of the claim.
        claim: Claim that data_sync wrote to.
        publish: How workers get the data: in-place, clone, snapshot, each-node, auto or none.
        source: Source of the data, as given to data_sync; with each-node every pod reads it.
        run_id: Id of the pipeline run, which holds a published claim; empty for nobody.
        options: Further settings by name, such as {"keep_claims": 1}; all are in the README.
        sync: The options that data_sync was given, for each-node.
    """
    inputs = dict(locals())
    from kfp_ddp.datasets.volume.engine import run

    return run(**inputs)
