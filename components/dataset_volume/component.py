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
    source: str = "",
    storage_class: str = "",
    snapshot_class: str = "",
    keep_claims: int = 3,
    wait_seconds: int = 600,
    populator_account: str = "",
) -> NamedTuple("Volume", [("claim", str), ("path", str)]):
    """Make a synced version of a dataset ready to be mounted by any number of workers.

    Do not mount the claim in this step: a copy is made only when no writer has it mounted.
    A published claim is named ds-<dataset>-<first 12 digits of the digest> and used again.

    Args:
        report: Which claim to mount, how it was made, and why so.
        dataset: Name of the dataset, as given to data_sync; empty for its default, which needs
            the source.
        digest: Digest of the version, from data_sync.
        path: Folder of the version, from data_sync; it is the same in every copy of the claim.
        claim: Claim that data_sync wrote to.
        publish: in-place: workers mount the same claim read-only. clone or snapshot: a
            ReadOnlyMany claim copied by the storage. populator: GKE fills a claim from the
            bucket. auto: the best of in-place, clone and snapshot that is known to work here.
            none: change nothing.
        source: Source of the data, as given to data_sync; kept as an annotation, and read by the
            populator.
        storage_class: Class of the published claim; empty for that of the staging claim.
        snapshot_class: VolumeSnapshotClass; empty for the cluster's default.
        keep_claims: Published claims of the dataset to keep; older ones that no pod uses are
            deleted with their snapshots. 0 for all.
        wait_seconds: The longest wait for writers to end, for a snapshot and for binding.
        populator_account: Kubernetes service account that the populator reads the bucket with.
    """
    from kfp_ddp.components.dataset_volume.engine import run
    from kfp_ddp.components.dataset_volume.request import Request

    return run(
        report,
        Request(
            dataset=dataset,
            digest=digest,
            path=path,
            claim=claim,
            publish=publish,
            source=source,
            storage_class=storage_class,
            snapshot_class=snapshot_class,
            keep_claims=keep_claims,
            wait=wait_seconds,
            populator_account=populator_account,
        ),
    )
