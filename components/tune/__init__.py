"""Ranks trainings that were tried with different settings, and hands on the best."""

from .component import tune

__all__ = ["tune"]
