"""Evaluation of a checkpoint on all samples, on any number of ranks."""
