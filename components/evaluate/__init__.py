"""Exact evaluation of a checkpoint on one split of a dataset, with a report."""
