"""The component `dataset_volume`: a version of a dataset as a claim that workers mount."""

from .component import dataset_volume

__all__ = ["dataset_volume"]
