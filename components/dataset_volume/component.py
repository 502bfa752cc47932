"""The KFP component `dataset_volume`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def dataset_volume(
    report: dsl.Output[dsl.Markdown],
    dataset: str,
    digest: str,
    path: str,
    claim: str,
    publish: str = "in-place",
) -> NamedTuple("Volume", [("claim", str), ("path", str)]):
    """Make a synced version of a dataset ready to be mounted by any number of workers.

    Do not mount the claim in this step: a mounted writer blocks snapshots of it.

    Args:
        report: Which claim to mount and why.
        dataset: Name of the dataset, as given to data_sync.
        digest: Digest of the version, from data_sync.
        path: Folder of the version, from data_sync; it is the same in every copy of the claim.
        claim: Claim that data_sync wrote to.
        publish: in-place: workers mount the same claim, read-only.
    """
    from kfp_ddp.components.dataset_volume.engine import run

    return run(report, dataset, digest, path, claim, publish)
