"""The first step of a training run: everything that can be known before a byte moves."""

from .component import preflight

__all__ = ["preflight"]
