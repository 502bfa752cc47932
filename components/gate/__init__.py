"""Decides whether an evaluated model may be exported, and says why."""

from .component import gate

__all__ = ["gate"]
