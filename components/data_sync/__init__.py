"""The component `data_sync`: a bucket prefix to a verified version on a claim."""

from .component import data_sync

__all__ = ["data_sync"]
