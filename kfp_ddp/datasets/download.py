"""Bring objects to a stage, into versions as into a plain folder."""

from collections.abc import Sequence

from kfp_ddp.datasets.context import Context
from kfp_ddp.datasets.result import Result
from kfp_ddp.datasets.stage import FileStage
from kfp_ddp.datasets.transfer import Transfer


def download(context: Context, stage: FileStage, missing: Sequence[int], result: Result) -> None:
    """Bring the missing objects to the stage, and note in the result what that took.

    Raises:
        Changed: some are no longer as listed.
    """
    listing, options = stage.listing, context.options
    size = sum(listing.sizes[i] for i in missing)
    transfer = Transfer(
        context.source,
        listing,
        stage,
        concurrency=options.concurrency,
        bandwidth=options.bandwidth_mb * 1e6,
        retry=context.retry,
    )
    context.watch("downloading", transfer.meter, len(missing), size)
    transfer.run(missing)
    result.retries += transfer.meter.retries
    result.downloaded, result.downloaded_bytes = len(missing), size
