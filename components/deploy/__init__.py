"""Puts a published bundle to work on KServe, and takes it back where it does not answer."""

from .component import deploy

__all__ = ["deploy"]
