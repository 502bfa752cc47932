"""A step that runs a distributed job of any kind."""

from .component import job

__all__ = ["job"]
