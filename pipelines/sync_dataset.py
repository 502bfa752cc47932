"""The pipeline `sync_dataset`: sync a bucket to a PVC, without training."""

from kfp import dsl

from kfp_ddp.checks.form import StepResources, described
from kfp_ddp.pipelines.steps import Claims, Steps


@dsl.pipeline(
    name="sync-dataset",
    display_name="Sync a dataset from a bucket",
    description="Bucket to a verified version on a claim, named by its content, and to a "
    "ReadOnlyMany copy where publish asks for one. Unchanged data costs one listing.",
)
@described
def sync_dataset(
    source: str,
    dataset: str = "",
    claim: str = "kfp-ddp-data",
    publish: str = "in-place",
    sync: dict = {},  # noqa: B006
    bucket_secret: str = "kfp-ddp-bucket",  # noqa: S107
) -> None:
    """Sync a bucket, and prepare its version for mounting."""
    limits = StepResources().model_dump(include={"sync_cpu", "sync_memory"})
    named = {"dataset": dataset, "data_claim": claim, "publish": publish, "sync": sync}
    form = {"source": source, "bucket_secret": bucket_secret}
    Steps(form, Claims(), {**named, **limits, "layout": {}}).data()
