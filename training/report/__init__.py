"""Metrics, trackers and traces of a run, and where its time went."""
