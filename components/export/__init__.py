"""Turns a checkpoint into a bundle that other runtimes serve, and proves that they agree."""

from .component import export

__all__ = ["export"]
