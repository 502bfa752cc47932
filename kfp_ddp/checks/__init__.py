"""Checks before a run: of its settings, and of the cluster."""
