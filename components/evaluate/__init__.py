"""Exact evaluation of a checkpoint on one split of a dataset, with a report."""

from .component import evaluate

__all__ = ["evaluate"]
