"""Decides whether an evaluated model may be exported, and says why."""

from kfp_ddp.components.gate.component import gate

__all__ = ["gate"]
