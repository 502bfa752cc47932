"""Cleanup at the end of a run."""
