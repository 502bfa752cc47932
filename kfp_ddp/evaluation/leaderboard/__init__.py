"""Comparison of the trials of a sweep."""
