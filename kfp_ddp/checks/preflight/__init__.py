"""Checks of a run before a byte is moved."""
