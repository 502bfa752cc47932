"""Tells a registry of models what lies at a destination of exports."""

from kfp_ddp.components.register.component import register

__all__ = ["register"]
