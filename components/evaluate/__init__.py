"""Exact evaluation of a checkpoint on one split of a dataset, with a report."""

from kfp_ddp.components.evaluate.component import evaluate

__all__ = ["evaluate"]
