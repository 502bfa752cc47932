"""Tells a registry of models what lies at a destination of exports."""

from .component import register

__all__ = ["register"]
