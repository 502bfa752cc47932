"""The component `data_sync`: a bucket prefix to a verified version on a claim."""

from kfp_ddp.components.data_sync.component import data_sync

__all__ = ["data_sync"]
