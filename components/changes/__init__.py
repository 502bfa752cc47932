"""Tells whether a training would come to anything that is not known already."""

from .component import changes

__all__ = ["changes"]
